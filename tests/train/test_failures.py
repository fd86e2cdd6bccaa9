"""A generation that breaks: who holds what, and that going on loses and changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from elastic_train.config import RunSpec
from elastic_train.errors import GroupBroken
from elastic_train.testing.gang import From, Gang
from elastic_train.testing.gang_member import abort, has_come_to
from elastic_train.testing.gloo_pool import GlooPool, PerRank
from tests.tasks.tiny import VOCABULARY, WIDTH, TinyData, TinyTask, tiny_run

pytestmark = pytest.mark.ring2


def spec(**changes: Any) -> RunSpec:
    """Without comparisons, which wait for all ranks: some are to be ahead here."""
    given = {"max_steps": 6, "precision": "fp32", "clip_norm": 2.0, "compare_replicas": None}
    return tiny_run(**{**given, **changes})


def is_settled(state: dict, step: int) -> bool:
    now = state["member"].progress()
    return (now.phase, now.step) == ("settled", step)


def lose_answer_of(state: dict, step: int) -> None:
    """End a step between its vote and its update, as where the vote's answer is lost on the way."""

    def on_step(report: Any) -> None:
        if report.step == step:
            raise GroupBroken(generation=report.generation, reason="the answer was lost")
        state["reports"].append(report)

    state["on_step"] = on_step


@pytest.mark.parametrize(("mesh", "phase"), [((1, 3), "forward"), ((3, 1), "backward"), ((1, 2), "vote")])
def test_an_abort_before_the_vote_discards_the_step_and_it_runs_again_the_same(
    pool: GlooPool, mesh: tuple[int, int], phase: str
) -> None:
    gang = Gang(pool, TinyTask(), spec())
    plan = gang.plan(*mesh)
    gang.form(plan)
    expected = [(r.loss, r.grad_norm) for r in gang.run()]

    gang.form(plan)
    running = gang.begin_until(1, phase, 3)
    gang.abort()
    outcomes = running.results()
    assert all(end is None and error.startswith("GroupBroken") for end, error, _ in outcomes)
    reports = outcomes[0][2]
    assert [r.step for r in reports] == [1, 2]
    held = gang.local_states()
    assert {h.step for h in held} == {2}
    # A partial gradient is no evidence: only who entered the vote reached step 3.
    assert {h.reached for h in held} <= ({None, 3} if phase == "vote" else {None})

    gang.form(plan, None, From(generation=gang.generation, step=2, holders=gang.processes))
    reports += gang.run()
    assert [(r.loss, r.grad_norm) for r in reports] == expected


@pytest.mark.parametrize("mesh", [(1, 3), (2, 1)])
def test_a_laggard_rolls_forward_to_the_bits_of_those_who_passed_the_vote(
    pool: GlooPool, mesh: tuple[int, int]
) -> None:
    gang = Gang(pool, TinyTask(batch_norm=True), spec(precision="fp32"))
    plan = gang.plan(*mesh)
    gang.form(plan)
    expected, state = [r.loss for r in gang.run()], gang.whole()

    gang.form(plan)
    pool.run(lose_answer_of, 4, ranks=[1])
    running = gang.begin()
    gang.wait_for([1], is_settled, 3)
    gang.wait_for([0], has_come_to, "forward", 5)
    gang.abort()
    outcomes = running.results()
    reports = outcomes[0][2]
    assert [r.step for r in reports] == [1, 2, 3, 4]
    assert [r.step for r in outcomes[1][2]] == [1, 2, 3]
    held = {h.rank: h for h in gang.local_states()}
    assert (held[0].step, held[0].applied.step) == (4, 4)  # type: ignore[union-attr]
    assert (held[1].step, held[1].reached) == (3, 4)

    vote = held[0].applied
    gang.form(plan, None, From(generation=gang.generation, step=4, holders=gang.processes, vote=vote))
    assert [r.loss for r in reports + gang.run()] == expected
    final = gang.whole()
    assert all(np.array_equal(final[name], state[name]) for name in state)


class PoisonedData(TinyData):
    """Sample 7 has no target, which makes its loss infinite."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "poison": torch.tensor(float("inf") if index == 7 else 1.0)}


class Poisoned(TinyTask):
    def dataset(self) -> TinyData:
        return PoisonedData(self.samples)

    def loss(self, output: torch.Tensor, micro_batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        loss, count = super().loss(output, micro_batch)
        return loss * micro_batch["poison"].prod(), count


def test_a_step_that_is_not_finite_is_skipped_the_same_under_every_plan(pool: GlooPool) -> None:
    run_spec = spec(precision="fp64")
    gang = Gang(pool, Poisoned(), run_spec)
    runs = []
    for mesh in [(1, 1), (1, 3), (2, 1)]:
        gang.form(gang.plan(*mesh))
        runs.append((gang.run(), gang.whole()))
    skipped = [[r.step for r in reports if r.skipped] for reports, _ in runs]
    assert skipped[0]
    assert all(each == skipped[0] for each in skipped)
    (at,) = skipped[0]
    for reports, state in runs:
        # Schedule and rates stand still for the skipped step.
        assert reports[at].rates == reports[at - 1].rates
        for name in state:
            np.testing.assert_allclose(state[name], runs[0][1][name], rtol=1e-9, atol=1e-12)


class Raising(TinyTask):
    def loss(self, output: torch.Tensor, micro_batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        return look_up(micro_batch)


def look_up(micro_batch: dict[str, torch.Tensor]) -> Any:
    return micro_batch["no such entry"]


@pytest.mark.parametrize("mesh", [(1, 1), (1, 2)])
def test_an_error_of_the_users_code_carries_the_users_traceback(
    pool: GlooPool, mesh: tuple[int, int]
) -> None:
    gang = Gang(pool, Raising(), spec())
    gang.form(gang.plan(*mesh))
    for end, error, _ in gang.begin().results():
        assert end is None
        assert error.startswith("UserCodeError")
        assert "in look_up" in error
        assert "KeyError: 'no such entry'" in error
        assert "elastic_train/train/" not in error


class Sparse(TinyTask):
    def model(self) -> torch.nn.Module:
        model = super().model()
        model.embed.sparse = True
        model.head = torch.nn.Linear(WIDTH, VOCABULARY)  # untied: a tie adds a dense gradient
        return model


@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (1, 2)])
def test_sparse_gradients_are_refused_by_name_and_never_skipped(
    pool: GlooPool, mesh: tuple[int, int]
) -> None:
    task = Sparse(groups=False)
    gang = Gang(pool, task, spec())
    gang.form(gang.plan(*mesh))
    for _, error, reports in gang.begin().results():
        assert not reports
        assert error.startswith("ConfigError")
        assert "'embed.weight' is sparse" in error


class Counting(torch.nn.Module):
    """Counts its calls in a floating buffer, which no plan can agree on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def reset_parameters(self) -> None:
        self.calls.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


class Counted(TinyTask):
    def model(self) -> torch.nn.Module:
        model = super().model()
        model.gate = torch.nn.Sequential(model.gate, Counting())
        return model


def test_a_buffer_that_a_forward_changes_is_refused_under_several_ranks(pool: GlooPool) -> None:
    gang = Gang(pool, Counted(), spec(max_workers=1))
    gang.form(gang.plan(1, 1))
    assert gang.run()[-1].step == 6
    gang = Gang(pool, Counted(), spec())
    for mesh in ((1, 1), (1, 2)):  # alone too, where more may come
        gang.form(gang.plan(*mesh))
        for _, error, _ in gang.begin().results():
            assert error.startswith("ConfigError: model.gate.1.calls")


class OneRaises(TinyTask):
    """Only the process that counts micro-batch 4 sees the error."""

    def dataset(self) -> TinyData:
        return RaisingData(self.samples)


class RaisingData(TinyData):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if torch.distributed.get_rank() == 1 and state_of["step"] == 2:
            raise ValueError("sample cannot be read")
        return super().__getitem__(index)


state_of = {"step": 0}


def follow_steps(state: dict) -> None:
    def fault(phase: str, step: int, micro: int) -> None:
        state_of["step"] = step

    state["faults"] = fault


def test_ranks_beside_the_one_whose_user_code_failed_end_when_they_are_aborted(pool: GlooPool) -> None:
    gang = Gang(pool, OneRaises(), spec())
    gang.form(gang.plan(1, 2))
    pool.run(follow_steps, ranks=gang.processes)
    running = gang.begin()
    (failed,) = running.results(ranks=[1])
    assert failed[1].startswith("UserCodeError")
    assert "sample cannot be read" in failed[1]
    gang.wait_for([0], has_come_to, "forward", 2)
    gang.abort([0])
    outcome = running.results()[0]
    assert outcome[1].startswith("GroupBroken")
    assert {h.step for h in gang.local_states()} == {1}


def test_a_generation_aborted_before_it_is_joined_is_not_formed(pool: GlooPool) -> None:
    gang = Gang(pool, TinyTask(), spec())
    gang.form(gang.plan(1, 2))
    gang.pause_at(2)
    at = gang.held()
    pool.run(abort, at.generation + 1, ranks=[0, 1])
    store = (gang.pool.store_host, gang.pool.store_port)
    outcomes = pool.run(try_join, store, at.generation + 1, PerRank([0, 1]), ranks=[0, 1])
    assert all(error.startswith("GroupBroken") for error in outcomes)
    next(pool.generations)
    gang.form(gang.plan(2, 1), None, at)
    assert [r.step for r in gang.run()] == [3, 4, 5, 6]


def try_join(state: dict, store: tuple[str, int], generation: int, rank: int) -> str:
    from elastic_train.planner.plan import Mesh, Plan
    from elastic_train.train.rank_assignment import RankAssignment

    plan = Plan(mesh=Mesh(dp_shard=2), workers=("a", "b"), nodes=("a", "b"), shares=((0, 1), (2, 3, 4)))
    assignment = RankAssignment(
        generation=generation,
        rank=rank,
        plan=plan,
        store_host=store[0],
        store_port=store[1],
        address="127.0.0.1",
    )
    try:
        state["member"].join(assignment)
    except GroupBroken as error:
        return f"GroupBroken: {error}"
    return "joined"
