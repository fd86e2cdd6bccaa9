"""Predicted times against a schedule played event by event, and volumes against formulas by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.config import Parallelism
from elastic_train.planner.choose_plan import choose
from elastic_train.planner.cost import Cost
from elastic_train.planner.hardware import Hardware, Link
from elastic_train.planner.plan import WorkerSlot
from elastic_train.planner.problem import Problem
from elastic_train.planner.scoring import Scored
from tests.planner.models import transformer

pytestmark = pytest.mark.ring0


def worker_slots(n: int, per_node: int = 1) -> tuple[WorkerSlot, ...]:
    return tuple(WorkerSlot(worker=f"w{i}", node=f"n{i // per_node}") for i in range(n))


def scored(problem: Problem) -> Scored:
    chosen = choose(problem)
    assert isinstance(chosen, tuple), chosen.reason
    return chosen[0]


def cost_of(per_node: int = 1, hardware: Hardware | None = None, shape=None, **axes: int) -> Cost:
    size = 1
    for n in axes.values():
        size *= n
    fixed = Parallelism(**{"tp": 1, "pp": 1, "dp_shard": 1, "dp_replicate": 1} | axes)
    problem = Problem(
        worker_slots=worker_slots(size, per_node),
        shape=shape or transformer(),
        hardware=hardware or Hardware(),
        micro_batches=16,
        constraints=fixed,
        virtual=(1,),
    )
    return scored(problem).cost


def played(stages: list[float], micro_batches: int) -> float:
    """Seconds of 1F1B with a backward twice as long as a forward, by the order of each stage's work."""
    p, m = len(stages), micro_batches
    orders: list[list[tuple[str, int]]] = []
    for i in range(p):
        warm = min(p - 1 - i, m)
        steady = [step for k in range(warm, m) for step in (("F", k), ("B", k - warm))]
        orders.append([("F", k) for k in range(warm)] + steady + [("B", k) for k in range(m - warm, m)])
    done: dict[tuple[str, int, int], float] = {}
    clock, at = [0.0] * p, [0] * p
    while any(at[i] < len(orders[i]) for i in range(p)):
        for i in range(p):
            while at[i] < len(orders[i]):
                kind, k = orders[i][at[i]]
                needs = (kind, i - 1 if kind == "F" else i + 1, k)
                if 0 <= needs[1] < p and needs not in done:
                    break
                clock[i] = max(clock[i], done.get(needs, 0.0)) + stages[i] * (1 if kind == "F" else 2) / 3
                done[kind, i, k] = clock[i]
                at[i] += 1
    return max(clock)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.integers(1, 6), st.integers(6, 14))
def test_a_pipeline_takes_as_long_as_its_schedule_played_step_by_step(pp: int, blocks: int):
    shape = transformer(blocks=blocks)
    problem = Problem(
        worker_slots=worker_slots(pp),
        shape=shape,
        hardware=Hardware(),
        micro_batches=16,
        constraints=Parallelism(tp=1, dp_shard=1, pp=pp),
        virtual=(1,),
    )
    best = scored(problem)
    each = [row.seconds for row in shape.layers]
    stages = best.plan.stages or ((0, blocks),)
    times = [sum(each[1 + a : 1 + b]) for a, b in stages]
    times[-1] += each[-1]
    real = played(times, 16)
    # The slowest stage may be an early one, which starts before the pipeline is full: then less is waited.
    assert real <= best.cost.step_s * (1 + 1e-9)
    assert best.cost.step_s <= real * 1.1


def test_copies_sum_gradients_once_around_a_ring():
    link = Link(latency_s=0.25, bytes_per_s=1000.0)
    cost = cost_of(hardware=Hardware(between=link), dp_replicate=4)
    gradient = transformer().parameters * 4
    assert cost.reduction == pytest.approx(2 * 3 * (0.25 + gradient / 4 / 1000.0))
    assert cost.compute == pytest.approx(4 * sum(row.seconds for row in transformer().layers))


def test_shards_gather_twice_a_micro_batch_and_reduce_once_a_step():
    cost = cost_of(hardware=Hardware(between=Link(bytes_per_s=1000.0)), dp_shard=4)
    whole = transformer().parameters * 4
    assert cost.gathers == pytest.approx(4 * 2 * (3 / 4) * whole / 1000.0)
    assert cost.reduction == pytest.approx((3 / 4) * whole / 1000.0)


def test_tensor_parallelism_moves_eight_boundary_tensors_a_block_over_the_inner_link():
    cost = cost_of(per_node=2, hardware=Hardware(inside=Link(bytes_per_s=1e6)), tp=2)
    shape = transformer()
    moved = (8 * 4 + 2 * 1) * 2 * (1 / 2) * shape.boundary_bytes / 1e6  # 4 sums a block, 1 before, 1 after
    assert cost.compute == pytest.approx(16 * (sum(r.seconds for r in shape.layers) / 2 + moved))


def test_every_rank_of_tp_and_cp_sends_whole_activations_to_the_next_stage():
    link = Hardware(between=Link(bytes_per_s=1000.0))
    slots, boundary = 16 + 2 - 1, transformer().boundary_bytes
    for inner in ({}, {"tp": 2}, {"cp": 2}):
        cost = cost_of(per_node=2 if inner else 1, hardware=link, pp=2, **inner)
        ranks = 2 if inner else 1  # over one link
        assert cost.sends == pytest.approx(slots * 2 * ranks * boundary / 1000.0)


def test_ranks_of_a_node_share_its_link_and_one_node_needs_none():
    hardware = Hardware(between=Link(bytes_per_s=1000.0), inside=Link(bytes_per_s=1e9))
    shared = cost_of(per_node=2, hardware=hardware, dp_replicate=2, dp_shard=2)
    alone = cost_of(per_node=1, hardware=hardware, dp_replicate=2)
    assert shared.gathers < 1.0, "shards are together on a node"
    assert shared.reduction == pytest.approx(alone.reduction, rel=0.01), "half the bytes, half the link"
    assert cost_of(per_node=4, hardware=hardware, dp_replicate=4).reduction < 1.0


def test_workers_that_share_cores_slow_each_other_down():
    crowded = Hardware(cores=2.0, one_machine=True)
    assert cost_of(hardware=crowded, dp_replicate=4).compute == pytest.approx(
        2 * cost_of(dp_replicate=4).compute
    )
    assert cost_of(hardware=crowded, dp_replicate=2).compute == cost_of(dp_replicate=2).compute
    apart = replace(crowded, one_machine=False)
    assert cost_of(hardware=apart, dp_replicate=4).compute == cost_of(dp_replicate=4).compute


def test_a_slow_worker_gets_fewer_micro_batches():
    uneven = (*worker_slots(3), WorkerSlot(worker="slow", node="n3", speed=0.5))
    problem = Problem(
        worker_slots=uneven,
        shape=transformer(),
        hardware=Hardware(),
        micro_batches=14,
        constraints=Parallelism(dp_replicate=4, dp_shard=1, tp=1, pp=1),
    )
    best = scored(problem)
    by_worker = dict(zip(best.plan.workers, map(len, best.plan.shares), strict=True))
    assert by_worker == {"w0": 4, "w1": 4, "w2": 4, "slow": 2}
    assert best.cost.step_s == pytest.approx(4 * sum(r.seconds for r in transformer().layers))
