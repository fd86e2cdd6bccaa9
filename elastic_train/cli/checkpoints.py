"""`ckpt ls | show | verify`: what storage holds, read without Ray or torch."""

from __future__ import annotations

import json

from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.checkpoint.verify import verify
from elastic_train.cli.exits import CHECKPOINT, FINISHED
from elastic_train.errors import NoCheckpoint
from elastic_train.observe.text import columns
from elastic_train.planner.plan import bytes_text
from elastic_train.recovery.evidence import Stored
from elastic_train.storage.fsspec_store import open_store


def list_checkpoints(run: str, *, as_json: bool) -> None:
    directory = RunDirectory(open_store(run))
    commits = directory.commits()
    if as_json:
        print(json.dumps([_plain(c) | {"metrics": dict(directory.record(c).metrics)} for c in commits]))
        return
    rows = [("step", "generation", "term", "slot", "path")]
    rows += [(str(c.step), str(c.generation), str(c.term), str(c.slot), c.path) for c in commits]
    print(columns(rows) or "no checkpoint was committed yet")


def show_checkpoint(run: str, step: int | None, *, as_json: bool) -> None:
    directory = RunDirectory(open_store(run))
    stored = choose(directory, run, step)
    checkpoint = Checkpoint.of(directory, stored)
    fragments = checkpoint.fragments()
    counts: dict[tuple[str, str], int] = {}
    for key in fragments.key.tolist():
        counts[fragments.names[key]] = counts.get(fragments.names[key], 0) + 1
    tensors = [
        {
            "tensor": tensor,
            "state": state,
            "dtype": info.dtype,
            "shape": list(info.shape),
            "fragments": counts.get((tensor, state), 0),
        }
        for (tensor, state), info in checkpoint.tensors.items()
    ]
    if as_json:
        print(json.dumps({**_plain(stored), "document": dict(checkpoint.document), "tensors": tensors}))
        return
    total = int(fragments.nbytes.sum())
    print(f"step {stored.step}, generation {stored.generation}: {len(tensors)} tensors, {bytes_text(total)}")
    rows = [("tensor", "state", "dtype", "shape", "fragments")]
    rows += [
        (str(t["tensor"]), str(t["state"]), str(t["dtype"]), str(tuple(t["shape"])), str(t["fragments"]))
        for t in tensors
    ]
    print(columns(rows))


def verify_checkpoint(run: str, step: int | None) -> int:
    directory = RunDirectory(open_store(run))
    stored = choose(directory, run, step)
    report = verify(Checkpoint.of(directory, stored))
    print(report)
    return FINISHED if report.sound else CHECKPOINT


def choose(directory: RunDirectory, run: str, step: int | None) -> Stored:
    commits = directory.commits()
    found = [c for c in commits if step is None or c.step == step]
    if not found:
        there = ", ".join(str(c.step) for c in commits) or "none"
        wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        raise NoCheckpoint(url=run, problem=f"there is not {wanted}. Committed steps: {there}.")
    return found[-1]


def _plain(stored: Stored) -> dict[str, object]:
    return {
        "step": stored.step,
        "generation": stored.generation,
        "term": stored.term,
        "slot": stored.slot,
        "path": stored.path,
    }
