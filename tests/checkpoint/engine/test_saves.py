"""Saves behind the step on stores that are slow, fail, or are full, and in processes that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.checkpoint.verify import verify
from elastic_train.errors import CheckpointDeleted
from elastic_train.storage.memory_store import MemoryStore
from elastic_train.storage.posix_store import PosixStore
from elastic_train.storage.store import Store
from elastic_train.testing.faulty_store import Fail, FaultyStore, Full, Hold, Slow
from tests.checkpoint.engine.saves import SIZES, Trainer, state
from tests.checkpoint.engine.test_engine import WAIT_S

pytestmark = pytest.mark.ring1
SAVE_BYTES = 4 * sum(SIZES.values())


def newest_is_sound(store: Store) -> int:
    """The newest checkpoint loads, and is the state of its step; that step.

    One that was deleted while it was read has a newer one in its place.
    """
    while True:
        checkpoint = Checkpoint.newest(RunDirectory(store))
        assert checkpoint is not None
        step = int(checkpoint.document["step"])
        with suppress(CheckpointDeleted):
            assert verify(checkpoint).sound
            for name in SIZES:
                assert np.array_equal(checkpoint[name]["param"][:], state(name, step)), (name, step)
            return step


@pytest.mark.parametrize("save", [1, 3])
@pytest.mark.parametrize("share", [0.02, 0.9, 1.0])
def test_a_process_killed_at_any_byte_of_any_save_leaves_the_state_of_a_step(
    tmp_path: Path, save: int, share: float
) -> None:
    byte = int((save - 1 + share) * SAVE_BYTES)
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.engine.saves", str(tmp_path), str(byte)], check=False
    )
    assert done.returncode == -signal.SIGKILL
    store = PosixStore(tmp_path)
    if RunDirectory(store).newest() is None:
        assert save == 1
    else:
        assert newest_is_sound(store) in (save - 1, save)


def test_a_store_that_stands_still_stops_no_step_and_what_was_left_out_comes_when_it_goes_on() -> None:
    hold = Hold(operation="stream", call=2, reached=threading.Event(), go=threading.Event())
    store = MemoryStore()
    trainer = Trainer(FaultyStore(store, [hold]), slots=1)
    trainer.step(1, save=True)
    while trainer.engine.counts.delivered < 1:
        trainer.engine.fence()
    trainer.step(2, save=True)
    assert hold.reached.wait(WAIT_S)
    for step in range(3, 12):
        trainer.step(step, save=True)
    assert newest_is_sound(store) == 1
    assert trainer.engine.counts.skipped == 9
    hold.go.set()
    while trainer.engine.free == 0:
        trainer.engine.fence()
    trainer.step(12, save=False)  # owed since step 3
    trainer.engine.close()
    assert newest_is_sound(store) == 12


def test_two_saves_in_flight_are_both_whole() -> None:
    hold = Hold(operation="stream", call=1, reached=threading.Event(), go=threading.Event())
    store = MemoryStore()
    trainer = Trainer(FaultyStore(store, [hold]), slots=2)
    trainer.step(1, save=True)
    assert hold.reached.wait(WAIT_S)
    trainer.step(2, save=True)
    trainer.step(3, save=False)
    hold.go.set()
    trainer.engine.close()
    assert trainer.engine.counts.delivered == 2
    assert newest_is_sound(store) == 2


def test_a_store_that_fails_now_and_then_costs_those_saves_and_nothing_else() -> None:
    store = MemoryStore()
    trainer = Trainer(FaultyStore(store, [Fail(operation="stream", call=k) for k in (2, 3)]), wait=True)
    for step in range(1, 7):
        trainer.step(step, save=True)
        while trainer.engine.counts.delivered + trainer.engine.counts.failed < step:
            trainer.engine.fence()
        newest_is_sound(store)
    trainer.engine.close()
    assert (trainer.engine.counts.failed, trainer.engine.counts.delivered) == (2, 4)
    assert newest_is_sound(store) == 6


def test_a_full_disk_is_noted_for_each_save_and_the_last_good_checkpoint_stays() -> None:
    store = MemoryStore()
    trainer = Trainer(FaultyStore(store, [Full(after_bytes=int(2.5 * SAVE_BYTES))]), wait=True)
    for step in range(1, 6):
        trainer.step(step, save=True)
        while trainer.engine.counts.delivered + trainer.engine.counts.failed < step:
            trainer.engine.fence()
    trainer.engine.close()
    assert newest_is_sound(store) == 2
    assert [note.partition(":")[0] for note in trainer.notes] == [
        f"the snapshot of step {step} failed" for step in (3, 4, 5)
    ]
    assert all("No space left" in note for note in trainer.notes)


def test_storage_of_two_megabytes_a_second_holds_up_no_step_and_is_never_without_a_sound_checkpoint() -> None:
    store = MemoryStore()
    trainer = Trainer(FaultyStore(store, [Slow(bytes_s=2e6)]), slots=2)
    began, step = time.monotonic(), 0
    while trainer.engine.counts.delivered < 3:
        step += 1
        trainer.step(step, save=True)
        if trainer.engine.counts.delivered:
            assert newest_is_sound(store) <= step
    taken = time.monotonic() - began
    assert taken > 3 * SAVE_BYTES / 2e6
    assert trainer.engine.counts.blocked_s < taken / 2
    assert trainer.engine.counts.skipped > 0
    trainer.engine.close()
    assert newest_is_sound(store) <= step


@contextmanager
def disk(at: Path, size: int) -> Iterator[None]:
    """A file system of so many bytes."""
    if os.geteuid() != 0:
        pytest.skip("a file system of its own can only be mounted by root")
    at.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def test_a_disk_that_is_really_full_keeps_its_last_checkpoint_and_takes_more_when_it_has_room(
    tmp_path: Path,
) -> None:
    at = tmp_path / "disk"
    with disk(at, int(1.7 * SAVE_BYTES)):
        trainer = Trainer(PosixStore(at), wait=True)

        def until(what: str, count: int, step: int) -> int:
            while getattr(trainer.engine.counts, what) < count:
                step += 1
                trainer.step(step, save=True)
                while trainer.engine.counts.delivered + trainer.engine.counts.failed < step:
                    trainer.engine.fence()
            return step

        step = until("failed", 2, 0)
        assert newest_is_sound(PosixStore(at)) == 1
        assert any("No space left" in note for note in trainer.notes)
        more = f"remount,size={4 * SAVE_BYTES}"
        subprocess.run(["mount", "-o", more, str(at)], check=True)
        step = until("delivered", 3, step)
        trainer.engine.close()
        assert newest_is_sound(PosixStore(at)) == step
