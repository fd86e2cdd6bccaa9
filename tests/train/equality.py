"""What every plan is held to: the losses, norms, metrics and state of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from elastic_train.config import Batch, RunSpec
from elastic_train.planner.plan import Mesh
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.reference import assert_state_near, reference
from tests.tasks.chain import ChainTask

SPLITS = {1: (), 2: ((0, 1), (1, 4)), 3: ((0, 2), (2, 4), (4, 4)), 4: ((0, 1), (1, 2), (2, 3), (3, 4))}
"""Blocks by stage: uneven, and with a stage that is the head alone."""

Plans = Sequence[tuple[Mesh, dict[str, Any]]]
"""Meshes and what else their plans have: `recompute`, `sequence_parallel`, `shares`, `stages`."""


def spec(**changes: Any) -> RunSpec:
    """Three steps with the end of an epoch among them: one of two micro-batches, the last one smaller."""
    return RunSpec(
        **{
            "name": "chain",
            "storage_path": "/nowhere",
            "batch": Batch(global_size=13, micro_size=3, seed=11),
            "max_steps": 3,
            "min_workers": 1,
            "max_workers": 4,
            "precision": "fp64",
            "clip_norm": 2.0,
            **changes,
        }
    )


def check(pool: GlooPool, task: ChainTask, plans: Plans, run: RunSpec | None = None) -> None:
    """A run from the start under each of the plans."""
    run = run or spec()
    gang = Gang(pool, task, run)
    gang.form(gang.plan(1, 1))
    initial = gang.whole()
    expected = reference(task, run, initial)
    metrics = _metrics(gang) if task.evaluate_every else []
    for mesh, changes in plans:
        gang.form(gang.plan_on(mesh, **{"stages": SPLITS[mesh.pp], **changes}))
        started = gang.whole()
        assert started.keys() == initial.keys(), mesh
        assert all(np.array_equal(started[name], initial[name]) for name in initial), mesh
        reports = gang.run()
        steps = {r.step: r for r in reports}.values()  # one with metrics is told again
        found = {
            "loss": ([r.loss for r in steps], expected.losses),
            "norm": ([r.grad_norm for r in steps], expected.norms),
            "metric": ([value for r in reports for _, value in r.metrics], metrics),
        }
        for name, (values, wanted) in found.items():
            np.testing.assert_allclose(values, wanted, rtol=1e-9, err_msg=f"{name} of {mesh}")
        assert_state_near(gang.whole(), expected.state)


def check_moves(pool: GlooPool, task: ChainTask, moves: Sequence[tuple[Mesh, list[int]]]) -> None:
    """A run that goes from mesh to mesh, two steps on each, between these processes: no bit of the state
    changes on the way, and it trains as one process alone.
    """
    gang = Gang(pool, task, spec(max_steps=2 * len(moves)))
    gang.form(gang.plan(1, 1))
    expected, state = [r.loss for r in gang.run()], gang.whole()
    losses: list[float] = []
    for number, (mesh, processes) in enumerate(moves, start=1):
        before = gang.whole() if number > 1 else {}
        gang.form(gang.plan_on(mesh, stages=SPLITS[mesh.pp]), processes, gang.held() if number > 1 else None)
        after = gang.whole()
        assert all(np.array_equal(before[name], after[name]) for name in before), mesh
        reports = gang.run() if number == len(moves) else gang.pause_at(2 * number)
        assert [r.step for r in reports] == [2 * number - 1, 2 * number]
        losses += [r.loss for r in reports]
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    final = gang.whole()
    assert final.keys() == state.keys()
    assert_state_near(final, state)


def _metrics(gang: Gang) -> list[float]:
    found = [value for report in gang.run() for _, value in report.metrics]
    assert found
    return found
