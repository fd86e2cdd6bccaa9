"""Restore a member's shards from a committed checkpoint of any plan, reading each byte once."""

from __future__ import annotations

from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.resharding import check_cuts
from elastic_train.cluster.checkpoint_io import read_boxes
from elastic_train.cluster.messages import Filled
from elastic_train.errors import ChecksumMismatch, TensorMismatch
from elastic_train.train.member import Member


def restore(member: Member, checkpoint: Checkpoint) -> Filled:
    """All ranks of the new group call it, after they joined.

    TensorMismatch lists what doesn't fit before a byte is read; ChecksumMismatch if the whole isn't what was
    saved.
    """
    try:
        needs = member.forming.needs(checkpoint.whole(), foreign="foreign" in checkpoint.document)
        check_cuts(needs, checkpoint.tensors, checkpoint.kinds(), url=checkpoint.url)
    except TensorMismatch as error:
        raise TensorMismatch(url=checkpoint.url, problem=error.problem) from None
    member.forming.fill_together(needs, lambda boxes: read_boxes(checkpoint, boxes))
    notes = member.load(dict(checkpoint.document))
    digest = member.forming.digest()
    kept = checkpoint.document.get("state_digest")
    if kept is not None and digest != kept:
        raise ChecksumMismatch(
            url=checkpoint.url,
            problem=f"the restored state's digest is {digest:016x} and {kept:016x} was saved.",
        )
    return Filled(
        digest=digest,
        step=checkpoint.document["step"],
        notes=tuple(notes),
        by_module=member.forming.shards.by_module,
    )
