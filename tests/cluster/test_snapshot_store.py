"""What a peer store serves: the snapshot that was sealed, or nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_train.checkpoint.engine.arena import Arena, offsets, slot_bytes
from elastic_train.checkpoint.snapshot import Buffer, Snapshot
from elastic_train.cluster.peer_store import segments
from elastic_train.cluster.peer_store.snapshot_store import STEPS, SnapshotStore
from elastic_train.control.events import StepCommitted
from elastic_train.errors import GroupBroken, MemoryTooSmall
from elastic_train.geometry.box import Box
from elastic_train.geometry.digest import of_boxes
from elastic_train.geometry.fragments import Fragments

pytestmark = pytest.mark.ring1
SHAPE = (6, 4)
DOCUMENT = {"trainable": ["w"], "optimizer": {"scalars": {}, "states": []}}


def whole(step: int) -> np.ndarray:
    return (np.arange(24, dtype=np.float32) + 100 * step).reshape(SHAPE)


def sealed(
    arena: Arena, slot: int, *, rank: int, step: int, generation: int = 1, copied: bool = False
) -> Snapshot:
    """Rank r of two holds three rows of `w`, and all of them hold `b`."""
    box = Box((3 * rank, 0), (3, 4))
    table = Fragments.of(
        [("w", "param", "float32", SHAPE, box), ("b", "param", "float32", (5,), Box.whole((5,)))]
    )
    starts, used = offsets(table.nbytes.tolist())
    arena.open(slot)
    for start, data in zip(starts, (whole(step)[box.slices], np.full(5, step, np.float32)), strict=True):
        arena.slot(slot)[start : start + data.nbytes] = (
            np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        )
    buffer = Buffer(offsets=tuple(starts), nbytes=used, slot=slot, stamp=arena.seal(slot))
    there = Snapshot(
        generation=generation, rank=rank, step=step, fragments=table, document=DOCUMENT, buffer=buffer
    )
    here = there.attached(arena)
    return there.copied(here.buffer.data.copy()) if copied else here


def arena_of(slots: int) -> Arena:
    return Arena.private(slot_bytes([48, 20]), slots=slots)


def test_any_box_inside_what_two_ranks_sealed_is_served_to_the_bit() -> None:
    arena, snapshot_store = arena_of(2), SnapshotStore("n1")
    for rank in range(2):
        snapshot_store.put(sealed(arena, rank, rank=rank, step=7, copied=rank == 1))
    boxes = [Box((1, 2), (2, 2)), Box((3, 0), (3, 4)), Box((4, 1), (1, 3))]
    wanted = Fragments.of([("w", "param", "float32", SHAPE, b) for b in boxes])
    for box, data in zip(boxes, snapshot_store.read(1, 7, wanted), strict=True):
        assert np.array_equal(data.view(np.float32).reshape(box.sizes), whole(7)[box.slices])
    assert snapshot_store.digest_of(1, 7, wanted) == of_boxes(wanted, snapshot_store.read(1, 7, wanted))
    offer = snapshot_store.offer(1, 7)
    assert offer.document["trainable"] == ["w"]
    assert len(offer.holds) == 4
    assert [(s.rank, s.step) for s in snapshot_store.evidence()] == [(0, 7), (1, 7)]


def test_a_slot_that_is_written_again_is_no_evidence_from_its_first_byte_on() -> None:
    arena, snapshot_store = arena_of(1), SnapshotStore("n1")
    snapshot_store.put(sealed(arena, 0, rank=0, step=7))
    wanted = Fragments.of([("b", "param", "float32", (5,), Box.whole((5,)))])
    assert snapshot_store.evidence()
    arena.open(0)
    assert not snapshot_store.evidence()
    with pytest.raises(GroupBroken):
        snapshot_store.read(1, 7, wanted)
    arena.seal(0)
    assert not snapshot_store.evidence()


def test_the_newest_steps_stay_and_an_older_generation_until_the_second_snapshot_of_a_newer() -> None:
    arena, snapshot_store = arena_of(8), SnapshotStore("n1")
    for step in range(1, STEPS + 3):
        snapshot_store.put(sealed(arena, step, rank=0, step=step, copied=True))
    newest = range(3, STEPS + 3)
    assert [s.step for s in snapshot_store.evidence()] == list(newest)
    snapshot_store.put(sealed(arena, 0, rank=0, step=9, generation=2, copied=True), first=True)
    assert snapshot_store.generations() == {1, 2}
    snapshot_store.put(sealed(arena, 1, rank=0, step=10, generation=2, copied=True))
    assert [(s.generation, s.step) for s in snapshot_store.evidence()] == [(2, 9), (2, 10)]


def test_a_copy_makes_room_in_a_full_object_store_and_what_fits_in_no_way_is_refused_with_the_figure() -> (
    None
):
    arena, snapshot_store = arena_of(4), SnapshotStore("n1")
    copies = [sealed(arena, slot, rank=0, step=7 + slot, copied=True) for slot in range(3)]
    used = copies[0].buffer.nbytes
    snapshot_store.put(sealed(arena, 3, rank=1, step=7))  # of this node: in its segment, not in the store
    for each in copies[:2]:
        snapshot_store.put(each)
    snapshot_store.make_room(copies[2], 4 * used)
    assert [s.step for s in snapshot_store.evidence() if s.rank == 0] == [7, 8]
    snapshot_store.make_room(copies[2], 3 * used)  # of which a little has to stay free
    assert [s.step for s in snapshot_store.evidence() if s.rank == 0] == [8]
    with pytest.raises(MemoryTooSmall, match=f"{2 * used / 1e6:,.1f} MB in the object store"):
        snapshot_store.make_room(copies[2], used)
    assert [s.step for s in snapshot_store.evidence() if s.rank == 0] == [8], "the newest stays"


def said(step: int, **values: Any) -> StepCommitted:
    return StepCommitted(
        at=0.0,
        generation=1,
        step=step,
        loss=1.0,
        tokens=4.0,
        grad_norm=1.0,
        skipped=False,
        seconds=0.1,
        vote=(),
        **values,
    )


def test_the_steps_that_came_with_snapshots_are_known_once_even_where_the_bytes_are_gone() -> None:
    arena, snapshot_store = arena_of(2), SnapshotStore("n1")
    evaluated = said(6, metrics=(("accuracy", 0.5),))
    for rank, steps in enumerate(((said(5), said(6), said(7)), (said(4), said(5), evaluated))):
        snapshot_store.put(sealed(arena, rank, rank=rank, step=7 - rank), steps=steps)
    arena.open(0)
    assert snapshot_store.steps() == (said(4), said(5), evaluated, said(7))


def test_a_box_that_nobody_sealed_is_refused() -> None:
    arena, snapshot_store = arena_of(1), SnapshotStore("n1")
    snapshot_store.put(sealed(arena, 0, rank=0, step=7))
    across = Fragments.of([("w", "param", "float32", SHAPE, Box((2, 0), (2, 4)))])
    with pytest.raises(GroupBroken, match="does not hold"):
        snapshot_store.read(1, 7, across)


def _own(directory: str, ready: object) -> None:
    segments.create("dead", 4096, slots=1, directory=Path(directory))
    ready.set()  # type: ignore[attr-defined]
    signal.pause()


def test_a_sweep_removes_what_dead_peer_stores_left_and_nothing_else(tmp_path: Path) -> None:
    alive = segments.create("alive", 4096, slots=1, directory=tmp_path)
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    other = context.Process(target=_own, args=(str(tmp_path), ready))
    other.start()
    assert ready.wait(150)
    assert segments.sweep(tmp_path) == []
    assert other.pid is not None
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    assert segments.sweep(tmp_path) == ["elastic_train-dead"]
    assert [p.name for p in tmp_path.iterdir()] == ["elastic_train-alive"]
    alive.drop()
    assert not list(tmp_path.iterdir())


def test_a_segment_that_does_not_fit_is_refused_with_the_figure_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(MemoryTooSmall, match="MB"):
        segments.create("large", 10**15, slots=3, directory=tmp_path)
    assert not list(tmp_path.iterdir())
    segments.create("large", 4096, slots=1, directory=tmp_path).drop()


def test_what_would_pass_the_bound_of_a_node_is_refused_with_what_it_leaves() -> None:
    segments.check_allowed(10**15, taken=10**15, bound=None, what="3 snapshots")
    segments.check_allowed(3 * 10**6, taken=2 * 10**6, bound=5 * 10**6, what="3 snapshots")
    with pytest.raises(MemoryTooSmall, match=r"3\.0 MB in what Checkpoints\(peer_bytes=.* has 2\.9 MB"):
        segments.check_allowed(3 * 10**6, taken=2 * 10**6, bound=49 * 10**5, what="3 snapshots")


KILLED = """
import fcntl, os, signal, sys
from pathlib import Path
from elastic_train.checkpoint.engine import arena
from elastic_train.cluster.peer_store import segments
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
{where} = die
segments.create("half", 1 << 20, slots=3, directory=Path(sys.argv[1]))
"""


@pytest.mark.parametrize("where", ["fcntl.flock", "os.posix_fallocate", "arena.mmap.mmap"])
def test_a_peer_store_that_is_killed_while_it_makes_a_segment_leaves_nothing(
    tmp_path: Path, where: str
) -> None:
    program = KILLED.format(where=where)
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    assert segments.sweep(tmp_path) == ["elastic_train-half"]
    assert not list(tmp_path.iterdir())


ENDED = """
import os, sys, time
from pathlib import Path
from elastic_train.cluster.peer_store import segments
directory, name = Path(sys.argv[1]), "it's-$run-"
segments.remove_in_the_end(name, directory)
for number in range(2):
    segments.create(f"{name}{number}-{os.getpid()}", 4096, slots=1, directory=directory)
segments.create(f"{name}-0", 4096, slots=1, directory=directory)  # another process's
print("made", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_what_a_peer_store_made_goes_with_it_however_it_ends(tmp_path: Path, number: int) -> None:
    """And with nothing else: one that stands still has its memory."""
    command = [sys.executable, "-c", ENDED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"made\n"
        process.send_signal(number)
        if number == signal.SIGSTOP:
            time.sleep(1.0)
            assert len(list(tmp_path.iterdir())) == 3
            process.kill()
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert [path.name for path in tmp_path.iterdir()] == ["elastic_train-it's-$run--0"]


def test_a_sweep_knows_the_hidden_names_of_older_releases(tmp_path: Path) -> None:
    (tmp_path / ".elastic_train-old").write_bytes(b"x")
    assert segments.sweep(tmp_path) == [".elastic_train-old"]
