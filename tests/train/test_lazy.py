"""Snapshots copied while the next step runs hold what a save that stops training would have written."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from elastic_train.checkpoint.engine.arena import Arena
from elastic_train.checkpoint.engine.share import Share
from elastic_train.config import Batch, Checkpoints, RunSpec
from elastic_train.testing.gang import Gang, end, take
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.tiny import TinyModel, TinyTask
from elastic_train.train.member import Member
from elastic_train.train.saver import Lazy
from elastic_train.train.task import Task

pytestmark = pytest.mark.ring2
STEPS = 9
Kept = dict[int, list[tuple[Any, ...]]]


def spec() -> RunSpec:
    return RunSpec(
        name="tiny",
        storage_path="/nowhere",
        batch=Batch(global_size=12, micro_size=3, seed=5),
        max_steps=STEPS,
        min_workers=1,
        max_workers=4,
        precision="fp64",
        checkpoints=Checkpoints(every=1),
    )


class Meddler(TinyModel):
    """Writes to a parameter in forward, behind torch's back."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.frozen.weight.data.add_(0.125)
        return super().forward(tokens)


class MeddlingTask(TinyTask):
    def model(self) -> torch.nn.Module:
        return Meddler(0.1)


def start_lazily(state: dict[str, Any], task: Task, spec: RunSpec) -> None:
    """A member that takes a snapshot at every step where there is room, and keeps what is delivered."""
    end(state)
    state["reports"], state["saved"], state["notes"] = [], [], []
    state["last"] = threading.Event()

    def deliver(share: Share) -> None:
        pieces = [(p.tensor, p.state, p.dtype, p.shape, p.box, bytes(p.bytes())) for p in share.pieces]
        state["saved"].append((share.step, share.storage, pieces, share.document["step"]))
        share.release()
        if share.step == spec.max_steps:
            state["last"].set()

    state["member"] = Member(
        task,
        spec,
        on_step=state["reports"].append,
        saving=lambda described: Lazy(
            described,
            deliver,
            memory=lambda generation, size: Arena.private(size, slots=2),
            note=state["notes"].append,
            every_step=True,
        ),
    )


def wait_for_last(state: dict[str, Any]) -> bool:
    return state["last"].wait(20)


def by_step(saved: list[tuple[Any, ...]]) -> Kept:
    return {
        entry[0]: sorted(entry[-2], key=lambda piece: (piece[0], piece[1], str(piece[4]))) for entry in saved
    }


@pytest.mark.parametrize(
    ("task", "mesh"),
    [(TinyTask(batch_norm=True), (1, 2)), (TinyTask(batch_norm=True), (2, 1)), (MeddlingTask(), (2, 1))],
    ids=["sharded", "replicated", "a job that writes through .data"],
)
def test_what_is_delivered_is_the_state_of_its_step_to_the_bit(
    pool: GlooPool, new_generation: Iterator[int], task: Task, mesh: tuple[int, int]
) -> None:
    stopping = Gang(pool, new_generation, task, spec())
    stopping.form(stopping.plan(*mesh))
    stopping.run()
    expected = [by_step([(s, p, d) for s, p, d in own]) for own in pool.run(take, "saved", ranks=[0, 1])]
    lazy = Gang(pool, new_generation, task, replace(spec(), checkpoints=Checkpoints(every=1000)))
    pool.run(start_lazily, task, lazy.spec, ranks=[0, 1])
    lazy.form(lazy.plan(*mesh))
    lazy.run()
    assert all(pool.run(wait_for_last, ranks=[0, 1], timeout=30))
    for own, known in zip(pool.run(take, "saved", ranks=[0, 1]), expected, strict=True):
        assert own[-1][:2] == (STEPS, True), "the last step's checkpoint goes to storage"
        assert all(step == document for step, _, _, document in own)
        found = by_step(own)
        assert len(found) >= 2
        for step, pieces in found.items():
            assert pieces == known[step], f"step {step}"
    notes = [note for own in pool.run(take, "notes", ranks=[0, 1]) for note in own]
    assert bool(notes) == isinstance(task, MeddlingTask)
    assert all(note.startswith("frozen.weight:param") for note in notes)
