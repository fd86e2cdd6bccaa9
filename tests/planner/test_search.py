"""The choice of a plan, and its reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.config import Batch, Parallelism, RunSpec
from elastic_train.planner.data_parallel import DataParallel
from elastic_train.planner.goodput_model import Outlook
from elastic_train.planner.memory_model import memory_per_worker
from elastic_train.planner.model_shape import ModelShape, TensorShape
from elastic_train.planner.plan import Infeasible, Mesh, Plan, WorkerSlot
from elastic_train.planner.question import Planned, Question
from elastic_train.planner.search import planner_for

pytestmark = pytest.mark.ring0

FREE = Parallelism()
MODEL = ModelShape(
    tensors=tuple(
        TensorShape(fqn=f"layers.{i}.w", shape=(5040, 100), item_bytes=4, unit=f"layers.{i}")
        for i in range(12)
    ),
    micro_size=4,
    activation_bytes_per_sample=1 << 20,
)


def worker_slots(n: int) -> tuple[WorkerSlot, ...]:
    return tuple(WorkerSlot(worker=f"w{i}", node=f"n{i}") for i in range(n))


def choose(
    workers: int,
    *,
    micro_batches: int = 12,
    constraints: Parallelism = FREE,
    shards_that_fit: int | None = None,
    memory_bytes: int | None = None,
    previous: Planned | None = None,
    most: int | None = None,
) -> Planned | Infeasible:
    if shards_that_fit is not None:
        memory_bytes = memory_per_worker(MODEL, Mesh(dp_shard=shards_that_fit)).training
    planner = DataParallel(
        shape=MODEL if memory_bytes else None,
        micro_batches=micro_batches,
        constraints=constraints,
        memory_bytes=memory_bytes,
    )
    return planner(
        Question(worker_slots=worker_slots(workers), most=most, held=previous.plan if previous else None)
    )


def mesh_of(choice: Planned | Infeasible) -> tuple[int, int]:
    assert isinstance(choice, Planned), choice.reason
    return choice.plan.mesh.dp_replicate, choice.plan.mesh.dp_shard


AXIS = st.one_of(st.none(), st.integers(1, 5))


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.integers(1, 9), st.integers(1, 12), AXIS, AXIS, st.one_of(st.none(), st.integers(1, 12)))
def test_a_plan_is_legal_and_the_same_each_time(
    workers: int, micro_batches: int, replicate: int | None, shard: int | None, fitting: int | None
):
    constraints = Parallelism(dp_replicate=replicate, dp_shard=shard)
    choice = choose(workers, micro_batches=micro_batches, constraints=constraints, shards_that_fit=fitting)
    assert choice == choose(
        workers, micro_batches=micro_batches, constraints=constraints, shards_that_fit=fitting
    )
    limit = min(workers, micro_batches)
    if isinstance(choice, Infeasible):
        asked = (replicate or 1) * (shard or 1)
        assert asked > limit or (fitting or 1) > (shard or limit // (replicate or 1))
        return
    plan = choice.plan
    assert sorted(i for share in plan.shares for i in share) == list(range(micro_batches))
    assert max(map(len, plan.shares)) - min(map(len, plan.shares)) <= 1
    assert min(map(len, plan.shares)) >= 1
    assert len(set(plan.workers)) == plan.mesh.size <= limit
    assert plan.mesh.dp_replicate == (replicate or plan.mesh.dp_replicate)
    assert plan.mesh.dp_shard == (shard or plan.mesh.dp_shard) >= (fitting or 1)
    assert f"{plan.mesh.size} of {workers} worker{'s' * (workers > 1)}" in choice.reason


@pytest.mark.parametrize(
    ("workers", "shards_that_fit", "expected"),
    [
        (7, 1, (7, 1)),  # everything everywhere
        (8, 2, (4, 2)),  # as many copies as fit
        (7, 2, (3, 2)),  # of meshes with 6 of 7 workers the one with most copies
        (7, 3, (2, 3)),
        (10, 4, (2, 5)),  # 2 x 5 uses all, 2 x 4 would leave two idle
        (7, 4, (1, 7)),  # no two copies: one, over all
        (3, 2, (1, 3)),
    ],
)
def test_copies_come_before_workers_and_workers_before_fewer_shards(
    workers: int, shards_that_fit: int, expected: tuple[int, int]
):
    assert mesh_of(choose(workers, shards_that_fit=shards_that_fit)) == expected


def test_without_a_known_size_everything_is_on_every_worker():
    assert mesh_of(choose(5)) == (5, 1)


def test_workers_beyond_the_micro_batches_stay_idle():
    choice = choose(5, micro_batches=3)
    assert mesh_of(choice) == (3, 1)
    assert "2 idle because a step has 3 micro-batches" in choice.reason


def test_workers_beyond_those_that_were_asked_for_stay_idle():
    choice = choose(5, most=3)
    assert mesh_of(choice) == (3, 1)
    assert "2 idle because 3 are asked for" in choice.reason


def uneven(speeds: tuple[float, ...], *, held: Plan | None = None, form_s: float = 1.0) -> Planned:
    slots = tuple(replace(s, speed=v) for s, v in zip(worker_slots(len(speeds)), speeds, strict=True))
    outlook = Outlook(form_s=form_s, left_s=1000.0)
    answer = DataParallel(micro_batches=16)(Question(worker_slots=slots, held=held, outlook=outlook))
    assert isinstance(answer, Planned)
    return answer


def lengths(answer: Planned) -> list[int]:
    return [len(share) for share in answer.plan.shares]


def test_a_slow_worker_gets_less_and_as_much_again_when_it_keeps_up():
    even = uneven((1, 1, 1, 1))
    assert lengths(even) == [4, 4, 4, 4]
    less = uneven((1, 1, 1, 0.5), held=even.plan)
    assert lengths(less) == [5, 5, 4, 2]
    assert less.plan.workers == even.plan.workers
    assert lengths(uneven((1, 1, 1, 1), held=less.plan)) == [4, 4, 4, 4]


def test_shares_stay_where_others_gain_less_than_the_switch_takes():
    even = uneven((1, 1, 1, 1))
    assert uneven((1, 1, 1, 0.5), held=even.plan, form_s=600.0).plan == even.plan
    assert uneven((1, 1, 1, 0.98), held=even.plan).plan == even.plan


def test_where_parameters_are_cut_shares_are_even():
    slots = tuple(replace(slot, speed=0.5) for slot in worker_slots(2)) + worker_slots(4)[2:]
    planner = DataParallel(micro_batches=16, constraints=Parallelism(dp_replicate=2, dp_shard=2))
    answer = planner(Question(worker_slots=slots))
    assert isinstance(answer, Planned)
    assert lengths(answer) == [4, 4, 4, 4]


def test_a_fixed_shard_axis_uses_whole_copies_and_says_who_is_left():
    choice = choose(5, constraints=Parallelism(dp_shard=2))
    assert mesh_of(choice) == (2, 2)
    assert "4 of 5 workers: as dp_shard=2 asks, 1 idle because they fill no whole copy" in choice.reason


def test_a_fixed_number_of_copies_is_cut_over_all_workers():
    assert mesh_of(choose(7, constraints=Parallelism(dp_replicate=2))) == (2, 3)
    assert mesh_of(choose(7, constraints=Parallelism(dp_replicate=2, dp_shard=2))) == (2, 2)


@pytest.mark.parametrize(
    ("constraints", "micro_batches", "words"),
    [
        (Parallelism(dp_shard=4), 12, ["dp_shard=4 needs 4", "3 workers are there", "dp_shard up to 3"]),
        (
            Parallelism(dp_replicate=3, dp_shard=2),
            12,
            ["dp_replicate=3 x dp_shard=2 needs 6", "dp_replicate up to 1 or dp_shard up to 1"],
        ),
        (Parallelism(dp_replicate=5, dp_shard=5), 12, ["needs 25", "a product up to 3"]),
        (Parallelism(dp_shard=3), 2, ["a step has 2 micro-batches", "dp_shard up to 2"]),
        (Parallelism(tp=2), 12, ["parallelism.tp=2", "the legal value is 1"]),
        (Parallelism(pp=3), 12, ["parallelism.pp=3", "the legal value is 1"]),
    ],
)
def test_impossible_constraints_name_the_numbers_and_the_nearest_legal_values(
    constraints: Parallelism, micro_batches: int, words: list[str]
):
    answer = choose(3, constraints=constraints, micro_batches=micro_batches)
    assert isinstance(answer, Infeasible)
    assert [word for word in words if word not in answer.reason] == []


def test_tensor_and_pipeline_axes_of_one_are_no_constraint():
    assert mesh_of(choose(3, constraints=Parallelism(tp=1, pp=1))) == (3, 1)


def test_no_workers_is_infeasible():
    assert isinstance(choose(0), Infeasible)


def test_a_model_that_fits_nowhere_names_the_bytes_and_the_world_that_would_do():
    answer = choose(3, shards_that_fit=5)
    assert isinstance(answer, Infeasible)
    assert "6,048,000 parameters need" in answer.reason
    assert "under dp_shard 3 (weights 7.7 MiB, optimizer 15.4 MiB, gradients 7.7 MiB" in answer.reason
    assert "dp_shard 5 would fit on 5 workers with a micro-batch each" in answer.reason


def test_a_constraint_that_does_not_fit_is_told_which_value_would():
    answer = choose(6, constraints=Parallelism(dp_shard=2), shards_that_fit=3)
    assert isinstance(answer, Infeasible)
    assert "under dp_replicate 3 x dp_shard 2" in answer.reason
    assert answer.reason.endswith("dp_shard 3 would fit")


def test_micro_batches_too_large_are_told_the_size_that_fits():
    largest = memory_per_worker(MODEL, Mesh(dp_shard=4))
    answer = choose(4, memory_bytes=largest.training - largest.activations + (5 << 19))
    assert isinstance(answer, Infeasible)
    assert "micro_size 2 would fit" in answer.reason
    answer = choose(4, memory_bytes=1000)
    assert isinstance(answer, Infeasible)
    assert answer.reason.endswith("a worker has 1000.0 B: more workers do not help, larger ones do")


def test_a_change_whose_old_shards_do_not_fit_beside_the_new_is_avoided_or_said():
    one_copy = memory_per_worker(MODEL, Mesh(dp_shard=4)).training
    before = choose(4, memory_bytes=one_copy)
    assert isinstance(before, Planned)
    assert mesh_of(before) == (1, 4)
    # Six workers: with the old quarter beside a new sixth it fits, because nothing of a step is there.
    grown = choose(6, memory_bytes=one_copy, previous=before)
    assert isinstance(grown, Planned)
    assert (mesh_of(grown), grown.moves_live) == ((1, 6), True)

    tight = ModelShape(tensors=MODEL.tensors, slots=40)
    room = memory_per_worker(tight, Mesh(dp_shard=4)).training
    planner = DataParallel(shape=tight, micro_batches=12, memory_bytes=room)
    old = planner(Question(worker_slots=worker_slots(4)))
    assert isinstance(old, Planned)
    stay = planner(Question(worker_slots=worker_slots(5), held=old.plan))
    assert isinstance(stay, Planned)
    assert (mesh_of(stay), stay.moves_live) == ((1, 4), True), "the old cut needs no second copy"
    forced = replace(planner, constraints=Parallelism(dp_shard=5))
    kept = forced(Question(worker_slots=worker_slots(5), held=old.plan))
    assert isinstance(kept, Planned)
    assert kept.plan == old.plan
    assert "stays: for dp_shard 5 old shards do not fit beside new ones" in kept.reason
    others = forced(Question(worker_slots=worker_slots(6)[1:], held=old.plan))
    assert isinstance(others, Planned)
    assert not others.moves_live, "whoever is gone leaves no choice"
    assert "old shards do not fit beside new ones" in others.reason


def test_the_planner_of_a_run_is_a_value_that_maps_seats_to_a_plan():
    spec = RunSpec(
        name="r",
        storage_path="s",
        batch=Batch(global_size=12, micro_size=2),
        max_steps=1,
        min_workers=1,
        max_workers=8,
        parallelism=Parallelism(dp_shard=2),
    )
    planner = planner_for(spec)
    planned = planner(Question(worker_slots=worker_slots(5)))
    assert not isinstance(planned, Infeasible)
    plan = planned.plan
    assert (plan.mesh, len(plan.shares)) == (Mesh(dp_replicate=2, dp_shard=2), 4)
    again = planner(Question(worker_slots=worker_slots(5), held=plan))
    assert isinstance(again, Planned)
    assert again.plan == plan
    assert planner_for(spec) == planner
    assert isinstance(planner(Question(worker_slots=worker_slots(1))), Infeasible)
