"""The whole search: nothing better is left out, hard limits hold, reasons name what would be legal."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.config import Parallelism
from elastic_train.planner.choose_plan import choose
from elastic_train.planner.explain_plans import explain, table
from elastic_train.planner.goodput_model import Outlook, StepPace
from elastic_train.planner.hardware import Fleet, Hardware, Link
from elastic_train.planner.limits import limits, refused
from elastic_train.planner.model_shape import Widths
from elastic_train.planner.plan import Infeasible, Mesh, WorkerSlot
from elastic_train.planner.plan_cache import PlanCache
from elastic_train.planner.problem import Problem
from elastic_train.planner.question import Planned, Question
from elastic_train.planner.ranking import Ranking
from elastic_train.planner.scoring import Scored
from elastic_train.planner.search import Search
from elastic_train.planner.state_moves import HeldParts, moves, needed, shared
from tests.planner.models import transformer

pytestmark = pytest.mark.ring0

SLOW = Hardware(inside=Link(latency_s=1e-3, bytes_per_s=1e6), between=Link(latency_s=5e-3, bytes_per_s=2e5))


def worker_slots(*nodes: int) -> tuple[WorkerSlot, ...]:
    return tuple(
        WorkerSlot(worker=f"w{n}.{i}", node=f"n{n}") for n, size in enumerate(nodes) for i in range(size)
    )


def problem(*nodes: int, hardware: Hardware = SLOW, micro_batches: int = 12, **rest) -> Problem:
    return Problem(
        worker_slots=worker_slots(*nodes),
        **{"shape": transformer(), "hardware": hardware, "micro_batches": micro_batches} | rest,
    )


def best(asked: Problem) -> Scored:
    chosen = choose(asked)
    assert isinstance(chosen, tuple), chosen.reason
    return chosen[0]


def refusal(asked: Problem) -> str:
    chosen = choose(asked)
    assert isinstance(chosen, Infeasible)
    return chosen.reason


def everything(asked: Problem) -> list[Scored]:
    """Every mesh by itself, each forced by constraints, without the bounds of the search."""
    n = len(asked.worker_slots)
    found: list[Scored] = []
    for tp, pp, replicate, shard in itertools.product(range(1, n + 1), repeat=4):
        if tp * pp * replicate * shard <= n:
            fixed = Parallelism(tp=tp, pp=pp, dp_replicate=replicate, dp_shard=shard)
            one, fleet = replace(asked, constraints=fixed), Fleet.of(asked.worker_slots)
            known = limits(asked.shape, fleet, asked.micro_batches)
            if refused(fixed, known, fleet, asked.micro_batches) is None:
                found += itertools.islice(Ranking(one, known).best(), 1)
    return found


@settings(deadline=None, derandomize=True, max_examples=6)
@given(
    st.sampled_from([(4,), (2, 2), (3, 2), (1, 1, 1, 1), (4, 2)]),
    st.sampled_from([None, 700_000, 1_000_000, 2_000_000]),
    st.sampled_from([5, 12]),
)
def test_no_mesh_is_better_than_the_chosen_one(
    nodes: tuple[int, ...], memory: int | None, micro_batches: int
):
    asked = problem(*nodes, hardware=replace(SLOW, memory_bytes=memory), micro_batches=micro_batches)
    every = everything(asked)
    chosen = choose(asked)
    if isinstance(chosen, Infeasible):
        assert every == []
        return
    assert chosen == choose(asked)
    assert chosen[0].goodput >= max(scored.goodput for scored in every) * (1 - 0.004)


@settings(deadline=None, derandomize=True, max_examples=15)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 14),
    st.sampled_from([None, 500_000, 900_000, 3_000_000]),
)
def test_a_plan_keeps_every_hard_limit(nodes: list[int], micro_batches: int, memory: int | None):
    asked = problem(*nodes, hardware=replace(SLOW, memory_bytes=memory), micro_batches=micro_batches)
    fleet = Fleet.of(asked.worker_slots)
    ranking = Ranking(asked, limits(asked.shape, fleet, micro_batches))
    for scored in itertools.islice(ranking.best(), 5):
        plan, mesh = scored.plan, scored.plan.mesh
        assert sorted(i for share in plan.shares for i in share) == list(range(micro_batches))
        assert min(map(len, plan.shares)) >= mesh.pp
        assert mesh.tp in (1, 2)
        groups = [plan.nodes[i : i + mesh.tp] for i in range(0, mesh.size, mesh.tp)]
        assert all(len(set(group)) == 1 for group in groups), "tp stays within a node"
        assert len(set(plan.workers)) == mesh.size
        if mesh.pp > 1:
            assert (plan.stages[0][0], plan.stages[-1][1]) == (0, 8)
            assert len(plan.stages) == mesh.pp * plan.virtual
        assert memory is None or scored.memory.training <= memory


@pytest.mark.parametrize(
    ("asked", "nodes", "words"),
    [
        (Parallelism(tp=4), (4,), ["parallelism.tp=4", "2 key and value heads", "legal are 1, 2"]),
        (Parallelism(tp=2), (1, 1), ["parallelism.tp=2", "node of 1", "the legal value is 1"]),
        (Parallelism(pp=5), (4,), ["parallelism.pp=5", "10 layers, 12 micro-batches and 4 workers", "3, 4"]),
        (Parallelism(pp=2, dp_shard=3), (4,), ["needs 6 ranks", "room for 4", "dp_shard up to 2"]),
        (Parallelism(tp=2, dp_shard=2), (3, 1), ["needs 4 ranks", "room for 2 in blocks of 2 on a node"]),
        (Parallelism(pp=4, dp_replicate=4), (16,), ["needs 16 micro-batches", "has 12", "pp up to 3"]),
        (Parallelism(ep=2), (2,), ["parallelism.ep=2", "no experts", "the legal value is 1"]),
        (Parallelism(cp=3), (3,), ["parallelism.cp=3", "32 positions, 4 heads", "legal are 1, 2"]),
        (Parallelism(cp=4, tp=2), (8,), ["cp=4 is not possible with tp=2", "the 2 heads of each", "1, 2"]),
    ],
)
def test_a_constraint_that_cannot_be_names_the_nearest_legal_values(asked, nodes, words):
    reason = refusal(problem(*nodes, constraints=asked))
    assert [word for word in words if word not in reason] == [], reason


def test_axes_that_no_mesh_meets_together_are_refused():
    experts = replace(transformer(), widths=Widths(experts=4))
    reason = refusal(problem(2, micro_batches=1, shape=experts, constraints=Parallelism(ep=2)))
    assert "no mesh of 2 workers with 1 micro-batches" in reason


def test_constraints_are_respected():
    plan = best(problem(4, 4, constraints=Parallelism(tp=2, pp=2, dp_shard=2))).plan
    assert (plan.mesh.tp, plan.mesh.pp, plan.mesh.dp_shard, plan.mesh.dp_replicate) == (2, 2, 2, 1)


def test_a_model_that_fits_nowhere_is_told_what_would_do():
    reason = refusal(problem(1, 1, hardware=replace(SLOW, memory_bytes=1_500_000)))
    assert "parameters need" in reason
    assert "workers would do" in reason
    reason = refusal(problem(1, hardware=replace(SLOW, memory_bytes=300)))
    assert reason.endswith("more workers do not help, larger ones do")
    # The states take 6.0 MB, what one sample of a micro-batch keeps takes 0.1 MB at the least.
    large = transformer(micro_size=8)
    reason = refusal(problem(1, hardware=replace(SLOW, memory_bytes=6_700_000), shape=large))
    assert "micro_size 4 would fit, or 2 workers would do" in reason


def test_recomputation_is_chosen_only_where_memory_asks_for_it():
    free = best(problem(1, hardware=replace(SLOW, memory_bytes=1 << 40)))
    assert free.plan.recompute == "none"
    tight = best(problem(1, hardware=replace(SLOW, memory_bytes=free.memory.training - 1)))
    assert tight.plan.recompute == "selective"
    tighter = best(problem(1, hardware=replace(SLOW, memory_bytes=tight.memory.training - 1)))
    assert tighter.plan.recompute == "full"
    assert free.cost.step_s < tight.cost.step_s < tighter.cost.step_s


def test_a_worker_that_fits_no_faster_plan_is_idle():
    plan = best(problem(1, 1, 1, 1, 1, micro_batches=4, constraints=Parallelism(pp=1, dp_shard=1))).plan
    assert plan.mesh.dp_replicate == 4


def test_a_change_has_to_promise_more_than_the_hysteresis():
    first = best(problem(1, 1, 1, constraints=Parallelism(dp_replicate=3)))
    asked = problem(1, 1, 1, previous=first.plan, outlook=Outlook(hysteresis=1e9))
    chosen = choose(asked)
    assert isinstance(chosen, tuple)
    assert chosen[0].plan == first.plan
    assert chosen[0].moves.total == 0.0


def test_short_quiet_times_ask_for_cheap_changes():
    # Two workers join a pipeline: in a long quiet the faster mesh pays, in a short one what moves least.
    first = best(problem(1, 1, constraints=Parallelism(pp=2)))
    grown = problem(1, 1, 1, 1, previous=first.plan, outlook=Outlook(quiet_s=1e9, hysteresis=0.0))
    calm = best(grown)
    stormy = best(replace(grown, outlook=Outlook(quiet_s=5.0, form_s=0.1, hysteresis=0.0)))
    assert calm.cost.step_s < stormy.cost.step_s
    assert stormy.moves.most < calm.moves.most


def test_a_lone_copy_is_worth_less_where_a_loss_costs_work():
    memory = replace(SLOW, memory_bytes=1 << 40)
    safe = best(problem(1, 1, 1, hardware=memory, outlook=Outlook(quiet_s=100.0, lost_s=1000.0)))
    assert safe.plan.mesh.dp_replicate > 1


def test_survivors_of_a_pipeline_keep_their_stages():
    fixed = Parallelism(pp=4, dp_replicate=1, dp_shard=1, tp=1)
    first = best(problem(1, 1, 1, 1, constraints=fixed)).plan
    gone = first.workers[1]
    left = (*(s for s in worker_slots(1, 1, 1, 1) if s.worker != gone), WorkerSlot(worker="new", node="n9"))
    again = best(replace(problem(1, constraints=fixed), worker_slots=left, previous=first))
    assert again.plan.workers == tuple("new" if w == gone else w for w in first.workers)
    blocks = (0.0, *[1.0] * 8, 0.0)
    lost = sum(stop - start for start, stop in first.stages_of(1))
    assert moves(first, again.plan, blocks).total == lost


def test_parts_of_two_plans_share_what_intervals_of_layers_and_shards_share():
    old = HeldParts(
        mesh=best(problem(1, 1, constraints=Parallelism(pp=2))).plan.mesh, stages=((0, 4), (4, 8))
    )
    whole = HeldParts(mesh=best(problem(1, 1, constraints=Parallelism(dp_shard=2))).plan.mesh)
    blocks = (2.0, *[1.0] * 8, 4.0)
    common = shared(old, whole, blocks)
    assert common.tolist() == [[3.0, 3.0], [4.0, 4.0]]
    assert needed(whole, blocks).tolist() == common.sum(axis=0).tolist()


def test_a_planner_that_was_asked_ahead_gives_the_answers_of_one_that_was_not():
    search = Search(micro_batches=12, shape=transformer(), hardware=SLOW)
    ready, there = PlanCache(planner=search), worker_slots(2, 2, 1)
    planned = search(Question(worker_slots=there))
    assert isinstance(planned, Planned)
    asked = [
        Question(worker_slots=tuple(s for s in there if s.node != node), held=planned.plan)
        for node in ("n0", "n1", "n2")
    ]
    for question in asked:
        ready.prepare(question)
    assert ready.found == 0
    assert [ready(question) for question in asked] == [search(question) for question in asked]
    assert ready.found == 3
    other = replace(asked[0], held=None)
    assert ready(other) == search(other)
    turned = replace(asked[0], worker_slots=asked[0].worker_slots[::-1])
    assert ready(turned) == search(turned)
    assert ready.found == 3, "another question has an answer of its own"


def test_the_end_of_a_run_is_the_end_of_what_a_change_can_gain():
    outlook = Outlook(left_s=100.0, hysteresis=0.0)
    assert outlook.goodput(1.0, 0.0) == 1.0
    assert outlook.goodput(1.0, 25.0) == pytest.approx(0.75)
    assert outlook.goodput(1.0, 200.0) > 0.0, "of changes that never pay the fastest plan is first"
    calm = Outlook(quiet_s=1e9, left_s=100.0)
    assert calm.goodput(1.0, 25.0) == pytest.approx(0.75)
    storm = Outlook(quiet_s=50.0, left_s=100.0)
    assert storm.goodput(1.0, 25.0) == pytest.approx((math.exp(-0.5) - math.exp(-2.0)) / (1 - math.exp(-2.0)))
    endless = Outlook(quiet_s=50.0)
    assert endless.goodput(1.0, 25.0) == pytest.approx(math.exp(-0.5))


def test_what_the_run_measured_of_its_plans_corrects_what_was_predicted():
    asked = problem(1, 1, 1, 1)
    first = best(asked)
    second = next(s for s in everything(asked) if s.plan.mesh == Mesh(dp_replicate=4))
    assert second.plan.mesh != first.plan.mesh

    def reported(of_first: float, of_second: float) -> Scored:
        """The choice after both ran, in times of their predictions."""
        ran = ((first, of_first), (second, of_second))
        paces = tuple(
            StepPace(
                mesh=s.plan.mesh,
                schedule=s.plan.schedule,
                recompute=s.plan.recompute,
                step_s=factor * s.cost.step_s,
            )
            for s, factor in ran
        )
        return best(replace(asked, outlook=Outlook(paces=paces)))

    assert reported(3.0, 3.0).plan == first.plan, "all predictions are too short alike"
    ratio = second.cost.step_s / first.cost.step_s
    kept = reported(1.0, 1.0 / (1.5 * ratio))
    assert kept.plan.mesh == second.plan.mesh, "it was the faster of the two"
    assert reported(9.0, 1.0).plan.mesh not in (first.plan.mesh,)
    gone = StepPace(mesh=Mesh(dp_replicate=9), schedule="1F1B", recompute="none", step_s=1.0)
    assert best(replace(asked, outlook=Outlook(paces=(gone, gone)))).plan == first.plan


@settings(deadline=None, derandomize=True, max_examples=10)
@given(st.sampled_from([(2, 2, 1), (1, 2, 2), (3, 3), (1, 1, 1, 1, 1)]), st.integers(1, 6))
def test_a_bound_on_the_ranks_is_kept_and_all_seats_are_looked_at(nodes: tuple[int, ...], most: int):
    """As good as the best choice of so many worker slots."""
    asked = problem(*nodes, most=most)
    scored = best(asked)
    assert scored.plan.mesh.size <= most
    some = [
        replace(asked, worker_slots=tuple(few), most=None)
        for few in itertools.combinations(asked.worker_slots, min(most, len(asked.worker_slots)))
    ]
    assert scored.cost.step_s <= min(best(few).cost.step_s for few in some) * 1.01


def test_a_search_takes_as_long_as_a_loss_allows():
    """Of this process's time: at most a tenth of a second for 64 ranks, and one for 1,024."""
    hardware = Hardware(inside=Link(bytes_per_s=2e11), between=Link(bytes_per_s=5e10), memory_bytes=80 << 30)
    shape = transformer(
        blocks=32, hidden=4096, heads=32, kv_heads=8, vocabulary=128_256, sequence=4096, block_s=0.05
    )
    for ranks, limit in ((64, 0.1), (1024, 1.0)):
        search = Search(micro_batches=2 * ranks, shape=shape, hardware=hardware, virtual=(1,))
        there = tuple(WorkerSlot(worker=f"w{i}", node=f"n{i // 8}") for i in range(ranks))
        times: list[float] = []
        for _ in range(5):
            began = time.process_time()
            planned = search(Question(worker_slots=there))
            held = planned.plan if isinstance(planned, Planned) else None
            search(Question(worker_slots=there[:-8], held=held))
            times.append((time.process_time() - began) / 2)
            if times[-1] < limit:
                break
        assert min(times) < limit, ranks


def test_an_explanation_ranks_meshes_and_names_what_each_costs_more():
    shown = explain(problem(2, 2))
    assert shown.rows[0].why_not == ""
    assert len({row.mesh for row in shown.rows}) == len(shown.rows) > 3
    assert all("less goodput" in row.why_not for row in shown.rows[1:])
    assert [row.goodput for row in shown.rows[1:]] == sorted(
        (row.goodput for row in shown.rows[1:]), reverse=True
    )
    assert any(limit.startswith("tp up to 2") for limit in shown.limits)
    assert table(shown.rows)[1][-1] == "chosen"
    nothing = explain(problem(1, hardware=replace(SLOW, memory_bytes=300)))
    assert (nothing.feasible, nothing.rows) == (False, ())
