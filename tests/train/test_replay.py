"""Lost stages of a pipeline come back from their base and their neighbours' logs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist

from elastic_train.config import RunSpec
from elastic_train.planner.plan import Mesh, Plan
from elastic_train.recovery.evidence import Vote
from elastic_train.recovery.substitute_plan import Substitute, substitute
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool, PerRank
from elastic_train.testing.replayed_stage import (
    Found,
    Kept,
    Neighbours,
    Part,
    State,
    by_box,
    held_now,
    kept_for,
    part_of,
    replay,
)
from elastic_train.train.boundary.crossing import Crossing
from elastic_train.train.rank_assignment import ReplayAssignment
from tests.tasks.chain import ChainTask
from tests.train.equality import SPLITS, spec

pytestmark = pytest.mark.ring2

STEPS = 5


def leave(state: State) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def leave_no_room(state: State) -> None:
    from elastic_train.train.state import initial_values as initial

    plain = initial.memory_room
    initial.memory_room = lambda: 100
    state["undo"] = lambda: setattr(initial, "memory_room", plain)


def replay_from_the_seed(state: State, assignment: ReplayAssignment, kept: Kept) -> Found:
    member = state["member"]
    member.substitute(assignment)
    member.forming.needs()
    member.forming.initialise()
    member.replay(STEPS, Neighbours(*kept))
    return held_now(state)


class Lost:
    """A pipeline that was logged from the start, what each rank began and ended with."""

    def __init__(
        self,
        pool: GlooPool,
        run: RunSpec,
        mesh: Mesh,
        groups: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.pool = pool
        gang = Gang(pool, ChainTask(), run)
        self.plan: Plan = gang.plan_on(mesh, stages=SPLITS[mesh.pp], groups=groups)
        gang.form(self.plan)
        self.generation = gang.generation
        self.ranks = range(mesh.size)
        self.base: list[Part] = pool.run(part_of, ranks=self.ranks)
        gang.run()
        self.final: list[Part] = pool.run(part_of, ranks=self.ranks)

    def kept(self, stages: tuple[int, int]) -> Kept:
        sent: dict[Crossing, torch.Tensor] = {}
        votes: dict[int, Vote] = {}
        size = len(self.ranks) // self.plan.mesh.pp
        for rank in self.ranks:
            if rank // size not in range(*stages):
                found, votes = self.pool.run(kept_for, stages, STEPS, ranks=[rank])[0]
                sent |= found
        return sent, votes

    def replayed(
        self, stages: tuple[int, int], workers: int, *, exact: bool = False, by_module: bool | None = None
    ) -> tuple[Substitute, list[tuple[Found, int]]]:
        """By the last processes of the pool, some of which hold other stages. From the seed where it is said
        how that gave its values, else from what the lost ranks began with."""
        processes = list(range(4 - workers, 4))
        found = substitute(self.plan, stages, [str(p) for p in processes], exact=exact)
        assert found is not None
        during = next(self.pool.generations)
        size = len(self.ranks) // self.plan.mesh.pp
        everybody = [tuple(s * size + n % found.inner for s in range(*stages)) for n in range(workers)]
        assignments = [
            ReplayAssignment(
                generation=self.generation,
                during=during,
                substitute=found,
                number=number,
                ranks=found.substituted_ranks(number)
                or everybody[number],  # to look at what they come to as well
                store_host=self.pool.store_host,
                store_port=self.pool.store_port,
                address="127.0.0.1",
                by_module=by_module,
            )
            for number in range(workers)
        ]
        bases = [[self.base[rank] for rank in ranks] for ranks in everybody]
        kept = self.kept(stages)
        assert kept[0]
        self.pool.run(leave, ranks=processes)
        if by_module is not None:
            found_ = self.pool.run(replay_from_the_seed, PerRank(assignments), kept, ranks=processes)
            return found, [(each, 0) for each in found_]
        return found, self.pool.run(
            replay, PerRank(assignments), PerRank(bases), kept, STEPS, ranks=processes
        )

    def expected(self, ranks: Sequence[int]) -> Found:
        found: Found = {}
        for rank in ranks:
            found |= by_box(*self.final[rank][:2])
        return found


def assert_same(found: Found, expected: Found) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(found[name], values), f"{name} differs"


def assert_close(found: Found, expected: Found, *, dtype: str, rtol: float) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name].view(dtype), values.view(dtype), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("precision", [pytest.param("fp64", marks=pytest.mark.matrix), "fp32"])
def test_any_lost_stage_replays_to_the_bit_alone(pool: GlooPool, precision: str) -> None:
    """Clipping, dropout, a tied embedding on the first and the last stage, a partial batch."""
    lost = Lost(pool, spec(max_steps=STEPS, precision=precision), Mesh(pp=3))
    before = lost.base[1][1]
    assert not all(np.array_equal(a, b) for a, b in zip(before, lost.final[1][1], strict=False))
    for stage in (0, 1, 2):
        _, [(found, logged)] = lost.replayed((stage, stage + 1), 1)
        assert_same(found, lost.expected([stage]))
        assert logged, "what the lost stage had sent is kept again"


def test_workers_that_share_a_lost_stage_agree_to_the_bit_and_are_within_rounding(pool: GlooPool) -> None:
    lost = Lost(pool, spec(max_steps=STEPS), Mesh(pp=3))
    for stage, workers in ((1, 2), (0, 3), (2, 2)):
        _, found = lost.replayed((stage, stage + 1), workers)
        for each, _ in found[1:]:
            assert_same(each, found[0][0])
        assert_close(found[0][0], lost.expected([stage]), dtype="f8", rtol=1e-9)


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(pp=2, dp_shard=2),
        pytest.param(Mesh(pp=2, tp=2), marks=pytest.mark.matrix),
        pytest.param(Mesh(pp=2, cp=2), marks=pytest.mark.matrix),
        pytest.param(Mesh(pp=2, dp_replicate=2), marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_the_ranks_of_a_lost_stage_replay_it_together_to_the_bit(pool: GlooPool, mesh: Mesh) -> None:
    """Also where some of its ranks are left, and where the stages share the embedding."""
    lost = Lost(pool, spec(max_steps=STEPS, precision="fp32"), mesh)
    for stage in (0, 1):
        _, found = lost.replayed((stage, stage + 1), 2, exact=True)
        for number, (each, _) in enumerate(found):
            assert_same(each, lost.expected([2 * stage + number]))


def test_adjacent_stages_that_log_nothing_between_them_replay_as_one(pool: GlooPool) -> None:
    lost = Lost(pool, spec(max_steps=STEPS), Mesh(pp=3), groups=((0, 2), (2, 3)))
    sent, _ = lost.kept((2, 3))
    assert {(c.source, c.target) for c in sent if c.kind != "tie"} == {(1, 2)}
    _, [(found, logged)] = lost.replayed((0, 2), 1)
    assert_close(found, lost.expected([0, 1]), dtype="f8", rtol=1e-9)
    assert not logged
    _, [(found, _)] = lost.replayed((2, 3), 1)
    assert_same(found, lost.expected([2]))


@pytest.mark.parametrize("by_module", [True, False])
def test_stages_that_are_replayed_from_the_seed_begin_as_they_began_whatever_room_there_is_now(
    pool: GlooPool, by_module: bool
) -> None:
    """By several ranks, of which one has no room: for the first values, or for those of the replay."""
    if by_module:
        pool.run(leave_no_room, ranks=[0])
    lost = Lost(pool, spec(max_steps=STEPS, precision="fp32"), Mesh(pp=2, dp_shard=2))
    if not by_module:
        pool.run(leave_no_room, ranks=[2])
    for stage in (0, 1):
        _, found = lost.replayed((stage, stage + 1), 2, exact=True, by_module=by_module)
        for number, (each, _) in enumerate(found):
            assert_same(each, lost.expected([2 * stage + number]))
