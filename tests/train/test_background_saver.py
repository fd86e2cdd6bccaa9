"""Snapshots copied while the next step runs hold what a save that stops training would have written."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from elastic_train.checkpoint.engine.arena import Arena
from elastic_train.checkpoint.snapshot import Snapshot
from elastic_train.config import Checkpoints, RunSpec
from elastic_train.testing.gang import Gang
from elastic_train.testing.gang_member import end, take
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.train.member import Member
from elastic_train.train.snapshot.background_saver import BackgroundSaver
from elastic_train.train.task import Task
from tests.tasks.tiny import TinyModel, TinyTask, tiny_run

pytestmark = pytest.mark.ring2
STEPS = 9
Kept = dict[int, list[tuple[Any, ...]]]


def spec() -> RunSpec:
    return tiny_run(12, max_steps=STEPS, checkpoints=Checkpoints(every=1))


@torch.library.custom_op("elastic_train_tests::shift", mutates_args=())
def shift(weight: torch.Tensor) -> torch.Tensor:
    """A custom operation that does not say what it writes to, as a kernel of one's own may."""
    if weight.device.type == "cpu":
        weight.detach().numpy()[...] += 0.125
    else:
        weight.data.add_(0.125)
    return weight.new_zeros(())


class Meddler(TinyModel):
    """Writes to a parameter in forward, behind torch's back, in two ways. Allowed to one worker."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if int(tokens.sum()) % 2:
            self.frozen.weight.data.add_(0.125)
        else:
            shift(self.frozen.weight)
        return super().forward(tokens)


class MeddlingTask(TinyTask):
    def model(self) -> torch.nn.Module:
        return Meddler(0.1)


COPY_S = 0.05


class Collecting:
    """A tier that keeps what is delivered once `gate` is set; with `copies` none begins before the one before
    is whole, which takes longer than a step, and none may be left out.
    """

    every_step = True

    def __init__(self, state: dict[str, Any], *, copies: bool) -> None:
        self._state, self._copies = state, copies
        self._open: set[int] = set()
        self._changed = threading.Condition()

    @property
    def binding(self) -> bool:
        return self._copies

    def memory(self, generation: int, size: int) -> Arena:
        return Arena.private(size, slots=2)

    def count_step(self) -> None:
        return None

    def step_took(self, seconds: float) -> None:
        return None

    def ready(self, timeout: float) -> bool:
        with self._changed:
            return not self._copies or self._changed.wait_for(lambda: not self._open, timeout)

    def crowded(self, *, storage: bool) -> bool:
        return self._copies and bool(self._open)

    def begun(self, step: int) -> None:
        with self._changed:
            self._open.add(step)

    def dropped(self, step: int) -> None:
        with self._changed:
            self._open.discard(step)
            self._changed.notify_all()

    def deliver(self, snapshot: Snapshot) -> None:
        self._state["gate"].wait()
        if self._copies:
            threading.Event().wait(COPY_S)
        pieces = [(p.tensor, p.state, p.dtype, p.shape, p.box, bytes(p.bytes())) for p in snapshot.pieces()]
        self._state["saved"].append((snapshot.step, snapshot.storage, pieces, snapshot.document["step"]))
        snapshot.buffer.release()
        self.dropped(snapshot.step)
        if snapshot.step == STEPS:
            self._state["last"].set()


def start_lazily(
    state: dict[str, Any], task: Task, spec: RunSpec, slow: bool = False, copies: bool = False
) -> None:
    """A member that takes a snapshot at every step where there is room, and keeps what is delivered.

    `slow`: the first one is being delivered until `let_go`. `copies`: as `Collecting` says.
    """
    end(state)
    state["reports"], state["saved"], state["notes"] = [], [], []
    state["last"], state["gate"] = threading.Event(), threading.Event()
    if not slow:
        state["gate"].set()
    tier = Collecting(state, copies=copies)
    state["member"] = Member(
        task,
        spec,
        device=state["device"],
        on_step=state["reports"].append,
        faults=lambda phase, step, micro: state.get("faults", no_fault)(phase, step, micro),
        saving=lambda described: BackgroundSaver(described, tier, state["notes"].append),
    )


def no_fault(phase: str, step: int, micro_batch: int) -> None:
    return None


def let_go(state: dict[str, Any]) -> None:
    state["gate"].set()


def wait_for_last(state: dict[str, Any]) -> bool:
    return state["last"].wait(100)


def has_saved_up_to(state: dict[str, Any], step: int) -> bool:
    """Whether a snapshot of this step or an earlier one was delivered. A generation has a thread for it."""
    return any(entry[0] <= step for entry in state["saved"])


def by_step(saved: list[tuple[Any, ...]]) -> Kept:
    return {
        entry[0]: sorted(entry[-2], key=lambda piece: (piece[0], piece[1], str(piece[4]))) for entry in saved
    }


@pytest.mark.parametrize(
    ("task", "mesh"),
    [(TinyTask(batch_norm=True), (1, 2)), (TinyTask(batch_norm=True), (2, 1)), (MeddlingTask(), (1, 1))],
    ids=["sharded", "replicated", "a job that writes through .data and a custom operation"],
)
def test_what_is_delivered_is_the_state_of_its_step_to_the_bit(
    pool: GlooPool, task: Task, mesh: tuple[int, int]
) -> None:
    ranks, most = range(mesh[0] * mesh[1]), 1 if isinstance(task, MeddlingTask) else 4
    run = replace(spec(), max_workers=most)
    stopping = Gang(pool, task, run)
    stopping.form(stopping.plan(*mesh))
    stopping.run()
    expected = [by_step([(s, p, d) for s, p, d in own]) for own in pool.run(take, "saved", ranks=ranks)]
    lazy = Gang(pool, task, replace(run, checkpoints=Checkpoints(every=1000)))
    pool.run(start_lazily, task, lazy.spec, ranks=ranks)
    lazy.form(lazy.plan(*mesh))
    lazy.run()
    assert all(pool.run(wait_for_last, ranks=ranks))
    for own, known in zip(pool.run(take, "saved", ranks=ranks), expected, strict=True):
        assert own[-1][:2] == (STEPS, True), "the last step's checkpoint goes to storage"
        assert all(step == document for step, _, _, document in own)
        found = by_step(own)
        assert len(found) >= 2
        for step, pieces in found.items():
            assert pieces == known[step], f"step {step}"
    notes = [note for own in pool.run(take, "notes", ranks=ranks) for note in own]
    assert bool(notes) == isinstance(task, MeddlingTask)
    assert all("frozen.weight:param" in note for note in notes), notes


def test_a_snapshot_on_its_way_while_the_group_is_resized_is_still_that_of_its_step(pool: GlooPool) -> None:
    stopping = Gang(pool, TinyTask(), spec())
    stopping.form(stopping.plan(1, 2))
    stopping.run()
    expected = [by_step([(s, p, d) for s, p, d in own]) for own in pool.run(take, "saved", ranks=[0, 1])]
    lazy = Gang(pool, TinyTask(), replace(spec(), checkpoints=Checkpoints(every=1000)))
    pool.run(start_lazily, TinyTask(), lazy.spec, True, ranks=[0, 1, 2])
    lazy.form(lazy.plan(1, 2))
    lazy.pause_at(4)
    lazy.form(lazy.plan(1, 3), origin=lazy.held())
    lazy.pause_at(7)
    pool.run(let_go, ranks=[0, 1, 2])
    lazy.form(lazy.plan(1, 3), origin=lazy.held())
    lazy.run()
    lazy.wait_for([0, 1], has_saved_up_to, 4)
    assert all(pool.run(wait_for_last, ranks=[0, 1, 2]))
    saved = pool.run(take, "saved", ranks=[0, 1, 2])
    for own, known in zip(saved[:2], expected, strict=True):
        first = min(own, key=lambda entry: entry[0])
        assert first[0] <= 4, "begun before the group was resized"
        assert by_step([first])[first[0]] == known[first[0]]
    assert all(max(own, key=lambda entry: entry[0])[:2] == (STEPS, True) for own in saved)


def test_a_step_waits_for_the_snapshot_before_it_where_none_may_be_left_out(pool: GlooPool) -> None:
    lazy = Gang(pool, TinyTask(), replace(spec(), checkpoints=Checkpoints(every=1000)))
    pool.run(start_lazily, TinyTask(), lazy.spec, False, True, ranks=[0, 1])
    lazy.form(lazy.plan(1, 2))
    lazy.run()
    assert all(pool.run(wait_for_last, ranks=[0, 1]))
    for own in pool.run(take, "saved", ranks=[0, 1]):
        assert [entry[0] for entry in own] == [*range(1, STEPS + 1)]
