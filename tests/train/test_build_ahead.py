"""A newcomer builds and warms up its model while others train; what they train is what it would have been."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

from elastic_train.config import Batch, RunSpec
from elastic_train.planner.plan import Plan
from elastic_train.testing.gang import Gang
from elastic_train.testing.gang_member import ask_for_pause_at, call
from elastic_train.testing.gloo_pool import GlooPool, PerRank
from elastic_train.train.rank_assignment import RankAssignment
from tests.train.group_calls import wait_until
from tests.train.programs import Fit, Net

pytestmark = pytest.mark.ring2

State = dict[str, Any]
COUNTER = CompileCounterWithBackend("aot_eager")


class Compiled(Fit):
    def model(self) -> Any:
        return torch.compile(Net(0.3), backend=COUNTER)


class Broken(Fit):
    """Looks at its values, which a model of zeros does not have."""

    def loss(self, output: Any, micro_batch: Any) -> Any:
        assert output.abs().sum() > 0.0
        return super().loss(output, micro_batch)


def spec() -> RunSpec:
    return RunSpec(
        name="ahead",
        storage_path="/nowhere",
        batch=Batch(global_size=12, micro_size=2, seed=5),
        max_steps=8,
        min_workers=1,
        max_workers=3,
        precision="fp64",
    )


def prepare(state: State, assignment: RankAssignment) -> None:
    """On a thread of its own, as in a worker; a newcomer's model is built by the caller of `build`."""
    state["points"] = []
    state["connecting"] = threading.Thread(
        target=lambda: state["member"].connect_ahead(assignment, state["points"].append)
    )
    state["connecting"].start()


def connected(state: State) -> bool:
    return not state["connecting"].is_alive()


def build(state: State, assignment: RankAssignment) -> list[str]:
    assert state["member"].holds_nothing
    state["member"].build_ahead(assignment, state["points"].append)
    return state["points"]


def compiled(state: State) -> int:
    return COUNTER.frame_count


def let_go(state: State, number: int) -> bool:
    member = state["member"]
    member.dismiss(0, number)
    assert member.progress().phase == "preparing" or not number
    assert member.progress().generation == 0, "it has no part in any group"
    member.leave_built(0, number)
    assert member.progress().phase == "idle"
    return dist.is_initialized()


class AheadGang(Gang):
    """Goes over to a group that was made ready."""

    ahead: list[RankAssignment]

    def assign(self, plan: Plan, number: int = 1) -> None:
        self.following = next(self.pool.generations)
        self.ahead = [
            RankAssignment(
                generation=self.following,
                rank=rank,
                plan=plan,
                store_host=self.pool.store_host,
                store_port=self.pool.store_port,
                address="127.0.0.1",
                step=4,
                prepared=number,
            )
            for rank in range(plan.world_size)
        ]

    def join(self, plan: Plan, processes: Sequence[int], by_module: bool | None = None) -> None:
        if plan.world_size < 3:
            super().join(plan, processes, by_module)
            return
        self.generation, self.processes = self.following, tuple(processes)
        self.pool.run(call, "join", PerRank(self.ahead), ranks=processes)


@pytest.mark.parametrize("task", [Compiled, Broken])
def test_a_newcomer_that_was_built_ahead_has_compiled_and_trains_as_if_nothing_was(
    pool: GlooPool, task: type[Fit]
) -> None:
    alone = Gang(pool, task(), spec())
    alone.form(alone.plan(1, 1), [3])
    expected = [r.loss for r in alone.run()]
    gang = AheadGang(pool, task(), spec())
    gang.form(gang.plan(2, 1), [0, 1])
    before = pool.run(compiled, ranks=[2])[0]
    gang.assign(gang.plan(3, 1))
    pool.run(ask_for_pause_at, 4, ranks=[0])
    running = gang.begin()
    for rank in range(3):
        pool.control(rank, prepare, gang.ahead[rank])
    wait_until(lambda: all(pool.control(rank, connected) for rank in range(3)))
    (points,) = pool.run(build, gang.ahead[2], ranks=[2])
    assert points[-4:] == ["taken up", "data", "warmed up", "built"]
    warmed = pool.run(compiled, ranks=[2])[0]
    assert (warmed > before) == (task is Compiled)
    losses = [r.loss for r in running.results()[0][2]]
    assert len(losses) == 4
    gang.form(gang.plan(3, 1), [0, 1, 2], gang.held())
    losses += [r.loss for r in gang.run()]
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    assert pool.run(compiled, ranks=[2])[0] == warmed, "nothing was compiled while others waited"


def test_what_was_built_ahead_is_let_go(pool: GlooPool) -> None:
    gang = AheadGang(pool, Compiled(), spec())
    gang.form(gang.plan(2, 1), [0, 1])
    for number in (1, 2):
        gang.assign(gang.plan(3, 1), number)
        for rank in range(3):
            pool.control(rank, prepare, gang.ahead[rank])
        wait_until(lambda: all(pool.control(rank, connected) for rank in range(3)))
        pool.run(build, gang.ahead[2], ranks=[2])
        assert pool.run(let_go, 0, ranks=[2]) == [False]
        for rank in (0, 1):
            pool.control(rank, call, "dismiss", 0, 0)
    assert len(gang.run()) == 8
