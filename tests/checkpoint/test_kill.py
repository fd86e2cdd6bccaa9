"""SIGKILL anywhere in a save: the committed checkpoints are exactly the old ones, and a prune removes the
rest.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.checkpoint.verify import verify
from elastic_train.recovery.evidence import Stored
from elastic_train.storage.fsspec_store import open_store
from elastic_train.testing.faulty_store import Fault, KillAtByte, KillAtWrite

pytestmark = pytest.mark.ring1

Save = Callable[..., Stored]

PROGRAM = """
import os, sys
import numpy as np
from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.writer import write_part
from elastic_train.geometry.box import Box
from elastic_train.storage.fsspec_store import open_store
from elastic_train.testing.faulty_store import FaultyStore, KillAtByte, KillAtWrite

def save(url, fault):
    store = FaultyStore(open_store(url), [fault])
    w = np.arange(1 << 19, dtype=np.float32)
    directory = attempt_path(step=6, generation=1)
    parts = []
    for i in range(2):
        box = Box((i << 18,), (1 << 18,))
        piece = Piece(tensor="w", state="param", dtype="float32", shape=w.shape, box=box, data=w[box.slices])
        parts.append(write_part(store, directory, i, [piece]))
    assembled = assemble(store, directory, parts, {"step": 6})
    RunDirectory(store).commit(assembled, term=1, generation=1, step=6, lineage=[(1, 0)])

for line in sys.stdin:  # one process imports; each save runs in a child of it, and dies there
    number, _, fault = line.partition(" ")
    child = os.fork()
    if not child:
        save(f"{sys.argv[1]}/{number}", eval(fault))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

WRITES = 7
"""Operations that change the store: two data files, two part manifests, state file, manifest, log record."""

CUTS: list[Fault] = [
    *(
        KillAtByte(byte=b)
        for b in (1, 8, 4096, 4097, 500_000, 1 << 20, (1 << 20) + 4096, 1_055_000, 2_000_000)
    ),
    *(KillAtWrite(call=i) for i in range(1, WRITES + 1)),
    *(KillAtWrite(call=i, after=True) for i in range(1, WRITES + 1)),
]


def test_a_killed_writer_leaves_the_committed_checkpoints_and_nothing_else(
    tmp_path: Path, save: Save
) -> None:
    before = RunDirectory(open_store(str(tmp_path / "before")))
    term = before.begin_term("a")
    for step in (2, 4):
        save(before, term=term, step=step)
    for number in range(len(CUTS)):
        shutil.copytree(tmp_path / "before", tmp_path / str(number))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        input="".join(f"{number} {cut!r}\n" for number, cut in enumerate(CUTS)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["-9"] * len(CUTS), done.stderr
    for number, cut in enumerate(CUTS):
        run = RunDirectory(open_store(str(tmp_path / str(number))))
        committed = cut == KillAtWrite(call=WRITES, after=True)
        stored = run.commits()
        assert [s.step for s in stored] == ([2, 4, 6] if committed else [2, 4]), cut
        assert verify(Checkpoint.of(run, stored[-1])).sound
        run.prune([s.slot for s in stored], term=run.begin_term("b"))
        checkpoints = Path(run.store.url, "checkpoints")
        assert {p.name for p in checkpoints.iterdir()} == {s.path.split("/")[1] for s in stored}, cut
        assert not [p for p in checkpoints.rglob("*") if p.name.startswith(".")], cut
        assert np.all(Checkpoint.of(run, stored[1]).read("w", "param") == 4.0)
