"""`ckpt ls | show | verify`: read checkpoints from storage, without Ray or torch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from elastic_train.checkpoint.document import encode
from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.checkpoint.resharding import as_words
from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.checkpoint.verify import verify
from elastic_train.cli.exit_codes import CHECKPOINT, FINISHED
from elastic_train.cli.output import say, say_json, say_line
from elastic_train.cli.progress import reading, stored_bytes
from elastic_train.cli.run_paths import absence_told, run_there
from elastic_train.errors import NoCheckpoint
from elastic_train.observe.text_columns import columns
from elastic_train.planner.plan import bytes_text
from elastic_train.recovery.evidence import Stored
from elastic_train.storage.commit_log import CommitRecord
from elastic_train.storage.fsspec_store import open_store


def list_checkpoints(run: str, *, as_json: bool) -> None:
    commits = run_there(run).records()
    if as_json:
        say_json([_plain(c) | {"metrics": dict(c.metrics)} for c in commits])
        return
    rows = [("step", "generation", "term", "slot", "path")]
    rows += [(str(c.step), str(c.generation), str(c.term), str(c.slot), c.path) for c in commits]
    say(columns(rows) or "no checkpoint was committed yet")


def show_checkpoint(run: str, step: int | None, *, as_json: bool) -> None:
    checkpoint = opened(run, step)
    kinds = checkpoint.kinds()
    counts = checkpoint.manifest.counts()
    tensors = [
        {
            "tensor": tensor,
            "state": state,
            "dtype": info.dtype,
            "shape": list(info.shape),
            "fragments": counts.get((tensor, state), 0),
            "cut": as_words(kinds[tensor, state]) if (tensor, state) in kinds else [],
        }
        for (tensor, state), info in checkpoint.tensors.items()
    ]
    if as_json:
        said = {"url": checkpoint.url, "document": json.loads(encode(checkpoint.document))}
        say_json({**said, "aliases": dict(checkpoint.aliases), "tensors": tensors})
        return
    total = sum(math.prod(i.shape) * ELEMENTS[i.dtype].bytes for i in checkpoint.tensors.values())
    say_line(f"{checkpoint.url}: {_whose(checkpoint)}, {len(tensors)} tensors, {bytes_text(total)}")
    rows = [("tensor", "state", "dtype", "shape", "fragments", "cut")]
    rows += [
        (
            str(t["tensor"]),
            str(t["state"]),
            str(t["dtype"]),
            str(tuple(t["shape"])),
            str(t["fragments"]),
            " ".join(str(word) for word in t["cut"]),
        )
        for t in tensors
    ]
    say(columns(rows))
    for alias, tensor in sorted(checkpoint.aliases.items()):
        say_line(f"{alias} is {tensor}")
    for view, part in sorted(checkpoint.views.items()):
        say_line(f"{view} is a part of {part.of}")


def verify_checkpoint(
    run: str, step: int | None, ledger: Path | None, *, as_json: bool, allow_roots: Sequence[str] | None
) -> int:
    checkpoint = opened(run, step, allow_roots=allow_roots or ())
    with reading("verified", checkpoint, total=stored_bytes(checkpoint)):
        report = verify(checkpoint, ledger=ledger)
    if as_json:
        say_json(
            {name: getattr(report, name) for name in report.__dataclass_fields__} | {"sound": report.sound}
        )
    else:
        say(report)
    return FINISHED if report.sound else CHECKPOINT


def opened(run: str, step: int | None, *, allow_roots: Sequence[str] = ()) -> Checkpoint:
    """The checkpoint of a run at a step, or the newest there, or another system's."""
    with absence_told(run):
        if step is None:
            return open_checkpoint(run, allow_roots=allow_roots)
        directory = RunDirectory(open_store(run))
        checkpoint = Checkpoint.of(directory, choose(directory, run, step))
    checkpoint.files.places.allow(allow_roots)
    return checkpoint


def _whose(checkpoint: Checkpoint) -> str:
    foreign = checkpoint.document.get("foreign") or {}
    step = checkpoint.document.get("step")
    who = f"by {foreign['system']}" if "system" in foreign else "ours"
    return who if step is None else f"step {step}, {who}"


def choose(directory: RunDirectory, run: str, step: int | None) -> Stored:
    commits = directory.commits()
    found = [c for c in commits if step is None or c.step == step]
    if not found:
        there = ", ".join(str(c.step) for c in commits) or "none"
        wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        raise NoCheckpoint(url=run, problem=f"there is not {wanted}. Committed steps: {there}.")
    return found[-1]


def _plain(record: CommitRecord) -> dict[str, object]:
    return {
        "step": record.step,
        "generation": record.generation,
        "term": record.term,
        "slot": record.slot,
        "path": record.path,
    }
