"""SIGKILL at any point of saves and deletions, on a file system and on S3: one sound checkpoint, no orphan.

A process saves step 6, which refers to the frozen bytes of step 2, while step 2 is deleted; then step 4 is
deleted. `SEED` moves the points of the matrix.
"""

from __future__ import annotations

import json
import os
import posixpath
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_train.checkpoint.manifest import Manifest
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.checkpoint.verify import verify
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.store import Store
from elastic_train.testing.faulty_store import Fault, KillAtByte, KillAtWrite
from elastic_train.testing.s3_server import S3Server

pytestmark = pytest.mark.ring1

QUICK = 10
"""Points of each kind of store that are always tried: 20 in all. The matrix has 100 of each."""

SIZE = 1 << 16
S3_SIZE = 11 << 18
"""Elements of the trained tensor on S3: each writer's half goes up in two parts."""

PROGRAM = """
import json, os, sys
import numpy as np
from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.references import References
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.writer import write_part
from elastic_train.geometry.box import Box
from elastic_train.storage import object_store
from elastic_train.storage.fsspec_store import open_store
from elastic_train.testing.faulty_store import FaultyStore, KillAtByte, KillAtWrite

object_store.BLOCK = 5 << 20  # the least that S3 takes: the trained file goes up in parts
options = json.loads(sys.argv[2])
base = np.arange(4096, dtype=np.float32)

def parts(run, references, step, size):
    directory = attempt_path(step=step, generation=1)
    unchanged = references.unchanged({"base"})
    w = np.full(size, step, dtype=np.float32)
    found = []
    for i in range(2):
        pieces = []
        for name, array in (("w", w), ("base", base)):
            half = len(array) // 2
            box = Box((i * half,), (half,))
            pieces.append(Piece(tensor=name, state="param", dtype="float32", shape=array.shape, box=box,
                                data=array[box.slices]))
        found.append(write_part(run.store, directory, i, pieces, unchanged=unchanged))
    return found

def commit(run, step, written, term):
    assembled = assemble(run.store, attempt_path(step=step, generation=1), written, {"step": step})
    return run.commit(assembled, term=term, generation=1, step=step, lineage=[(1, 0)])

def work(url, faults):
    store = open_store(url, options=options)
    run = RunDirectory(store)
    references = References(run)
    term = run.begin_term("a")
    stored = [commit(run, step, parts(run, references, step, 1000), term) for step in (2, 4)]
    faulty = FaultyStore(store, faults)
    run = RunDirectory(faulty)
    written = parts(run, References(run), 6, int(sys.argv[3]))
    run.prune([stored[1].slot], [(1, 6)], term=term, writing=1)
    newest = commit(run, 6, written, term)
    run.prune([newest.slot], term=term, writing=1)
    return faulty

for line in sys.stdin:  # one process imports; each try runs in a child of it, and dies there
    number, _, fault = line.strip().partition(" ")
    child = os.fork()
    if not child:
        done = work(f"{sys.argv[1]}/{number}", [eval(fault)] if fault else [])
        print(json.dumps([done.changes, done.written]), flush=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def attempt(url: str, options: Mapping[str, Any], size: int, lines: list[str]) -> list[str]:
    """What the processes that save and delete said, line by line."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, url, json.dumps(options), str(size)],
        input="".join(line + "\n" for line in lines),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split("\n")[:-1]


def points(changes: int, written: int, count: int, seed: int) -> list[Fault]:
    """Half of them at operations, before or after, and half at bytes."""
    draw = random.Random(seed)
    return [
        KillAtWrite(call=draw.randint(1, changes), after=draw.random() < 0.5)
        if i % 2
        else KillAtByte(byte=draw.randint(1, written))
        for i in range(count)
    ]


def check(store: Store, fault: Fault) -> None:
    """The newest checkpoint is whole; a new controller's prune leaves what kept checkpoints need."""
    run = RunDirectory(store)
    for _ in range(2):
        stored = run.newest()
        assert stored is not None, fault
        assert stored.step in (4, 6), fault
        checkpoint = Checkpoint.of(run, stored)
        assert verify(checkpoint).sound, fault
        assert np.all(checkpoint.read("w", "param") == stored.step), fault
        assert np.array_equal(checkpoint.read("base", "param"), np.arange(4096)), fault
        kept = run.commits()
        run.prune([s.slot for s in kept], term=run.begin_term("b"))
    needed: set[str] = set()
    for each in run.commits():
        own = {"state.json", "manifest.parquet", "w00000.parquet", "w00001.parquet"}
        data = store.read(f"{each.path}/manifest.parquet")
        own |= set(Manifest.decode(data, url="x").distinct("file"))
        needed |= {posixpath.normpath(f"{each.path}/{name}") for name in own}
    assert set(store.list("checkpoints")) == needed, fault
    assert store.unfinished("checkpoints") == [], fault


def killed_at(url: str, options: Mapping[str, Any], size: int, count: int, seed: int) -> None:
    said, code = attempt(url, options, size, ["calm"])
    assert code == "0"
    changes, written = json.loads(said)
    faults = points(changes, written, count, seed)
    codes = attempt(url, options, size, [f"{i} {fault!r}" for i, fault in enumerate(faults)])
    assert codes == ["-9"] * len(faults)
    for i, fault in enumerate(faults):
        check(open_store(f"{url}/{i}", options=options), fault)


def test_on_a_file_system_nothing_is_lost_and_nothing_is_left(tmp_path: Path) -> None:
    killed_at(str(tmp_path), {}, SIZE, QUICK, 1)


def test_on_s3_nothing_is_lost_and_nothing_is_left(s3: S3Server) -> None:
    killed_at(f"{s3.bucket('killed')}/quick", s3.options, S3_SIZE, QUICK, 2)


SEED = int(os.environ.get("SEED", "0"))


@pytest.mark.matrix
@pytest.mark.parametrize("twenty", range(5))
def test_a_hundred_points_of_a_file_system(tmp_path: Path, twenty: int) -> None:
    killed_at(str(tmp_path), {}, SIZE, 20, 1000 + 10 * SEED + twenty)


@pytest.mark.matrix
@pytest.mark.parametrize("twenty", range(5))
def test_a_hundred_points_of_s3(s3: S3Server, twenty: int) -> None:
    killed_at(f"{s3.bucket('killed')}/{twenty}", s3.options, S3_SIZE, 20, 2000 + 10 * SEED + twenty)
