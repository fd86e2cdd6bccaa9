"""Start a run from a checkpoint of another run or system."""

from __future__ import annotations

from elastic_train.checkpoint.import_run import adopt
from elastic_train.checkpoint.language.parse import parse
from elastic_train.checkpoint.language.specification import IDENTITY
from elastic_train.checkpoint.language.translated_view import as_ours
from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.config import ResumeFrom
from elastic_train.errors import NoCheckpoint
from elastic_train.recovery.evidence import Stored
from elastic_train.storage.store import Store


def begin(store: Store, resume_from: ResumeFrom, *, holder: str) -> Stored:
    """The checkpoint that the run at the root of `store` goes on from: its own, or the one adopted now."""
    run = RunDirectory(store)
    newest = run.newest()
    if newest is not None:
        return newest
    said = resume_from.specification
    spec = parse(said, origin="resume_from.specification") if said else IDENTITY
    source = open_checkpoint(
        resume_from.url, allow_roots=resume_from.allow_roots, names=resume_from.names or None
    )
    if not source.tensors:
        raise NoCheckpoint(url=resume_from.url, problem="it holds no tensors.")
    return adopt(as_ours(source, spec), store, holder=holder, copy=resume_from.copy)
