"""The log of a stage boundary: whole steps or a gap, bounded, forgotten once a checkpoint is durable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic_train.recovery.evidence import Vote
from elastic_train.train.boundary.boundary_log import BoundaryLog, Room
from elastic_train.train.boundary.crossing import Crossing

pytestmark = pytest.mark.ring2

KIB = 1024


def crossing(step: int, micro: int = 0, **values: object) -> Crossing:
    return Crossing(
        **{"step": step, "kind": "activation", "source": 0, "target": 1, "micro_batch": micro, **values}  # type: ignore[arg-type]
    )


def tensor(step: int, micro: int = 0, size: int = KIB) -> torch.Tensor:
    return torch.full((size // 4,), float(100 * step + micro))


def fill(log: BoundaryLog, steps: range, micro_batches: int = 2, size: int = KIB) -> None:
    for step in steps:
        for micro in range(micro_batches):
            log.keep(crossing(step, micro), tensor(step, micro, size))
        log.seal(Vote(step=step, values=(float(step),)))
        log.flush()


@pytest.fixture
def log() -> Iterator[BoundaryLog]:
    made = BoundaryLog(Room(memory=1 << 20, waiting=1 << 20))
    yield made
    made.close()


def test_what_was_kept_is_read_back_to_the_bit_in_every_dtype_and_shape(log: BoundaryLog) -> None:
    generator = torch.Generator().manual_seed(0)
    sent = {}
    for number, dtype in enumerate([torch.float32, torch.bfloat16, torch.float64, torch.int64]):
        for shape in ((3, 4), (), (0, 5), (7,)):
            made = (torch.randn(shape, generator=generator) * 100).to(dtype)
            name = crossing(1, number, name=str(shape))
            log.keep(name, made)
            sent[name] = made.clone()
    log.keep(crossing(1, 9), torch.arange(12.0).view(3, 4).t())
    log.flush()
    for name, made in sent.items():
        got = log.read(name)
        assert (got.dtype, got.shape) == (made.dtype, made.shape)
        assert torch.equal(got, made)
    assert torch.equal(log.read(crossing(1, 9)), torch.arange(12.0).view(3, 4).t())


def test_keep_returns_before_the_copy_is_made(log: BoundaryLog) -> None:
    with log._changed:  # the copying thread cannot take anything, and whoever keeps does not wait for it
        log.keep(crossing(1), tensor(1))
        with pytest.raises(KeyError):
            log.read(crossing(1))
    log.flush()
    assert torch.equal(log.read(crossing(1)), tensor(1))


def test_only_sealed_and_copied_steps_count_and_the_newest_run_without_a_gap(log: BoundaryLog) -> None:
    assert log.span() is None
    log.keep(crossing(1), tensor(1))
    log.flush()
    assert log.span() is None, "a step that was not voted on is not whole"
    fill(log, range(1, 4))
    assert log.span() == (1, 3)
    fill(log, range(5, 7))
    assert log.span() == (5, 6), "step 4 is missing"


def test_a_tensor_that_changed_before_it_was_copied_makes_a_gap(log: BoundaryLog) -> None:
    made = tensor(2)
    fill(log, range(1, 2))
    with log._changed:
        log.keep(crossing(2), made)
        made.add_(1)
    log.seal(Vote(step=2, values=()))
    log.flush()
    assert log.span() == (1, 1)


def test_a_step_that_was_broken_off_leaves_nothing_behind(log: BoundaryLog) -> None:
    fill(log, range(1, 3))
    log.keep(crossing(3), tensor(99))
    log.drop(3)
    with pytest.raises(KeyError):
        log.read(crossing(3))
    fill(log, range(3, 4))
    assert log.span() == (1, 3)
    assert torch.equal(log.read(crossing(3)), tensor(3))


def test_a_durable_checkpoint_frees_what_came_before_it(log: BoundaryLog) -> None:
    fill(log, range(1, 6))
    before = log.nbytes
    log.forget(3)
    assert log.span() == (4, 5)
    assert log.nbytes == before * 2 // 5
    with pytest.raises(KeyError):
        log.read(crossing(3))
    with pytest.raises(KeyError):
        log.vote(3)
    assert log.vote(4) == Vote(step=4, values=(4.0,))


def test_memory_is_bounded_the_oldest_goes_to_disk_and_reads_the_same(tmp_path: Path) -> None:
    log = BoundaryLog(Room(memory=4 * KIB, waiting=1 << 20, disk=1 << 20, directory=tmp_path))
    fill(log, range(1, 9))
    assert log._buffers.memory_used <= 4 * KIB
    assert log.nbytes == 16 * KIB
    assert log.span() == (1, 8)
    for step in range(1, 9):
        for micro in range(2):
            assert torch.equal(log.read(crossing(step, micro)), tensor(step, micro))
    log.forget(6)
    fill(log, range(9, 13))
    assert log._buffers._end <= 14 * KIB, "places in the file are used again"
    assert torch.equal(log.read(crossing(9, 1)), tensor(9, 1))
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_without_room_the_oldest_step_is_a_gap_and_nobody_waits(tmp_path: Path) -> None:
    for room in (
        Room(memory=4 * KIB, waiting=1 << 20),
        Room(memory=2 * KIB, waiting=1 << 20, disk=2 * KIB, directory=tmp_path),
    ):
        log = BoundaryLog(room)
        fill(log, range(1, 9))
        assert log.span() == (7, 8)
        assert log.nbytes <= 4 * KIB
        log.close()


def test_more_waiting_than_allowed_is_a_gap() -> None:
    log = BoundaryLog(Room(memory=1 << 20, waiting=KIB))
    fill(log, range(1, 2), micro_batches=1)
    with log._changed:  # the copying thread cannot take anything
        log.keep(crossing(2, 0), tensor(2, 0))
        log.keep(crossing(2, 1), tensor(2, 1))
    log.seal(Vote(step=2, values=()))
    log.flush()
    assert log.span() == (1, 1)
    fill(log, range(3, 4), micro_batches=1)
    assert log.span() == (3, 3)
    log.close()


def test_what_cannot_fit_at_all_is_a_gap() -> None:
    log = BoundaryLog(Room(memory=KIB, waiting=1 << 20))
    fill(log, range(1, 2), micro_batches=1, size=2 * KIB)
    assert log.span() is None
    log.close()


def test_a_step_whose_vote_broke_off_is_whole_and_its_outcome_is_left_to_others(log: BoundaryLog) -> None:
    log.keep(crossing(1), tensor(1))
    log.flush()
    assert log.reach() is None, "not everything was given to the log"
    log.close_step(1)
    assert log.reach() == (1, 0, True)
    fill(log, range(1, 4))
    assert log.reach() == (1, 3, False)
    log.keep(crossing(4), tensor(4))
    log.close_step(4)
    log.flush()
    assert log.reach() == (1, 3, True)
    log.drop(4)
    assert log.reach() == (1, 3, False)
    with pytest.raises(KeyError):
        log.read(crossing(4))
