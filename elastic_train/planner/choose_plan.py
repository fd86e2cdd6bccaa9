"""Choose by predicted goodput: the whole search, for a model whose layers are known."""

from __future__ import annotations

from dataclasses import replace

from elastic_train.planner.data_parallel import APART
from elastic_train.planner.goodput_model import more
from elastic_train.planner.limits import limits, refused
from elastic_train.planner.model_shape import ModelShape
from elastic_train.planner.plan import Infeasible, bytes_text, counted
from elastic_train.planner.problem import Problem
from elastic_train.planner.ranking import Ranking
from elastic_train.planner.scoring import Scored

SLACK = 0.003
"""Share of the goodput that predictions do not tell apart."""
LIVE_TRIES = 64
"""Candidates, best first, among which one is sought whose new shards fit beside the old ones."""


def choose(problem: Problem) -> tuple[Scored, str] | Infeasible:
    """The best plan and why, or why there is none; the same problem gives the same plan."""
    if not problem.worker_slots:
        return Infeasible(reason="no worker is there, one is enough to start")
    fleet = problem.fleet
    known = limits(problem.shape, fleet, problem.micro_batches)
    impossible = refused(problem.constraints, known, fleet, problem.micro_batches)
    if impossible is not None:
        return impossible
    ranking = Ranking(problem, known)
    if len(ranking.candidates) == 0:
        return Infeasible(
            reason=f"no mesh of {counted(fleet.workers, 'worker')} with "
            f"{problem.micro_batches} micro-batches a step meets {problem.constraints}; "
            "leave an axis to the planner"
        )
    best = _best(ranking)
    if best is None:
        return _nothing_fits(problem)
    stay = ranking.stay()
    if stay is None or stay.plan == best.plan:
        return best, f"{_headline(best, problem)}, the most of {len(ranking.candidates)} candidates"
    gain = best.goodput / stay.goodput - 1
    weighed = problem.outlook.said(best.change_s)
    if not best.moves_live:
        return stay, f"{stay.plan.mesh} stays: for {best.plan.mesh}{APART.removeprefix(';')}"
    if gain <= problem.outlook.hysteresis:
        return stay, f"{stay.plan.mesh} stays: {best.plan.mesh} promises {more(gain)}, {weighed}"
    moved = f"moving {bytes_text(best.moves.total)}"
    return best, f"{_headline(best, problem)}: {gain:.1%} more than {stay.plan.mesh}, {moved}, {weighed}"


def _best(ranking: Ranking) -> Scored | None:
    """The best whose new shards fit beside the old ones; the best where that holds for none of the first."""
    best = next(ranking.best(SLACK), None)
    if best is None or best.moves_live:
        return best
    return next(ranking.best(SLACK, live_among=LIVE_TRIES), best)


def _headline(scored: Scored, problem: Problem) -> str:
    plan, idle = scored.plan, len(problem.worker_slots) - scored.plan.mesh.size
    waiting = f", {idle} idle" if idle else ""
    size = bytes_text(scored.memory.training)
    there = problem.hardware.memory_bytes
    used = f"{size} of {bytes_text(there)}" if there else size
    return (
        f"{plan.mesh} on {plan.mesh.size} of {counted(len(problem.worker_slots), 'worker')}{waiting}: "
        f"{scored.cost.step_s:.3g} s a step, {used} per worker" + ("" if scored.moves_live else APART)
    )


def _nothing_fits(problem: Problem) -> Infeasible:
    """What a worker would need, and the smaller micro-batch or larger group that would do."""
    there = problem.hardware.memory_bytes
    assert there is not None
    need = _least_memory(problem, there)
    remedies: list[str] = []
    size = problem.shape.micro_size
    while size > 1 and not remedies:
        size //= 2
        if _fits(replace(problem, shape=_smaller(problem.shape, size))):
            remedies.append(f"micro_size {size} would fit")
    for times in (2, 4, 8, 16):
        worker_slots = tuple(
            replace(slot, worker=f"{slot.worker} {i}", node=f"{slot.node} {i}")
            for i in range(times)
            for slot in problem.worker_slots
        )
        if _fits(replace(problem, worker_slots=worker_slots, most=None)):
            remedies.append(f"{len(worker_slots)} workers would do")
            break
    return Infeasible(
        reason=f"{problem.shape.parameters:,} parameters need {bytes_text(need)} per worker at the "
        f"least on {len(problem.worker_slots)} and a worker has {bytes_text(there)}: "
        f"{', or '.join(remedies) or 'more workers do not help, larger ones do'}"
    )


def _least_memory(problem: Problem, there: int) -> int:
    """The smallest memory per worker that some plan fits in, to 2 %."""
    low, high = there, 2 * there
    while not _fits(_with(problem, high)):
        low, high = high, 2 * high
    while high > low * 1.02:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(_with(problem, middle)) else (middle, high)
    return high


def _with(problem: Problem, memory_bytes: int) -> Problem:
    return replace(problem, hardware=replace(problem.hardware, memory_bytes=memory_bytes))


def _fits(problem: Problem) -> bool:
    """Whether any plan fits; nothing is moved."""
    fleet = problem.fleet
    known = limits(problem.shape, fleet, problem.micro_batches)
    ranking = Ranking(replace(problem, previous=None), known)
    return ranking.any_fits()


def _smaller(shape: ModelShape, size: int) -> ModelShape:
    share = size / shape.micro_size
    layers = tuple(
        replace(
            row,
            activation_bytes=int(row.activation_bytes * share),
            dropped_bytes=int(row.dropped_bytes * share),
            working_bytes=int(row.working_bytes * share),
        )
        for row in shape.layers
    )
    return replace(shape, micro_size=size, layers=layers, boundary_bytes=int(shape.boundary_bytes * share))
