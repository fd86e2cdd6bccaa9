"""Explains a choice of plan: candidates side by side, and why the first one won."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastic_train.axes import MODEL
from elastic_train.planner.choose_plan import choose
from elastic_train.planner.limits import AxisLimits, limits
from elastic_train.planner.plan import Infeasible, bytes_text
from elastic_train.planner.problem import Problem
from elastic_train.planner.ranking import Ranking
from elastic_train.planner.scoring import Scored

LOOKED_AT = 200
"""Candidates taken from the ranking to find rows of different meshes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedPlan:
    """A candidate in numbers. Bytes and seconds."""

    mesh: str
    ranks: int
    idle: int
    stages: tuple[tuple[int, int], ...]
    schedule: str
    virtual: int
    recompute: str
    memory: int  # per rank, at the peak of a step
    step_s: float
    bubble: float  # share of the step
    moved: float
    goodput: float  # steps per second until the next change
    why_not: str  # empty: the winner


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    reason: str
    rows: tuple[ExplainedPlan, ...]  # the winner first; none where nothing is feasible
    limits: tuple[str, ...]  # why axes don't go further
    feasible: bool

    def json(self) -> dict[str, Any]:
        return asdict(self)


def explain(problem: Problem, rows: int = 12) -> Explanation:
    """The choice for a problem and the best candidates of other meshes."""
    fleet = problem.fleet
    known = limits(problem.shape, fleet, problem.micro_batches)
    chosen = choose(problem)
    if isinstance(chosen, Infeasible):
        return Explanation(reason=chosen.reason, rows=(), limits=_limits(known), feasible=False)
    winner, reason = chosen
    seen = {winner.plan.mesh}
    others: list[Scored] = []
    for scored in itertools.islice(Ranking(problem, known).best(), LOOKED_AT):
        if scored.plan.mesh not in seen and len(others) < rows - 1:
            seen.add(scored.plan.mesh)
            others.append(scored)
    total = len(problem.worker_slots)
    table = (_row(winner, winner, total), *(_row(scored, winner, total) for scored in others))
    return Explanation(reason=reason, rows=table, limits=_limits(known), feasible=True)


def table(
    rows: Sequence[ExplainedPlan], measured: Mapping[str, float] | None = None
) -> list[tuple[str, ...]]:
    """Rows as text, the header first. `measured` are seconds that a step took, by mesh."""
    header = ("mesh", "ranks", "idle", "stages", "schedule", "recompute", "memory", "step")
    took = () if not measured else ("measured",)
    return [
        (*header, *took, "bubble", "moves", "why not"),
        *(
            (
                row.mesh,
                str(row.ranks),
                str(row.idle),
                _sizes(row),
                row.schedule if row.stages else "",
                row.recompute,
                bytes_text(row.memory),
                f"{row.step_s:.3g} s",
                *(() if not measured else (f"{measured[row.mesh]:.3g} s" if row.mesh in measured else "",)),
                f"{row.bubble:.0%}",
                bytes_text(row.moved),
                row.why_not or "chosen",
            )
            for row in rows
        ),
    ]


def _row(scored: Scored, winner: Scored, workers: int) -> ExplainedPlan:
    plan = scored.plan
    return ExplainedPlan(
        mesh=str(plan.mesh),
        ranks=plan.mesh.size,
        idle=workers - plan.mesh.size,
        stages=plan.stages,
        schedule=plan.schedule,
        virtual=plan.virtual,
        recompute=plan.recompute,
        memory=scored.memory.training,
        step_s=scored.cost.step_s,
        bubble=scored.cost.bubble_share,
        moved=scored.moves.total,
        goodput=scored.goodput,
        why_not="" if scored is winner else _why_not(scored, winner),
    )


def _why_not(scored: Scored, winner: Scored) -> str:
    """The part of the cost that makes the difference."""
    if winner.moves_live and not scored.moves_live:
        return "old shards do not fit beside new ones"
    if scored.goodput >= winner.goodput:
        return "not enough better to be worth a change"
    lost = 1 - scored.goodput / winner.goodput
    parts = {name: value - getattr(winner.cost, name) for name, value in _parts(scored).items()}
    name, more = max(parts.items(), key=lambda item: item[1])
    if more <= 0:
        return f"{lost:.1%} less goodput: the change takes {scored.change_s:.3g} s"
    return f"{lost:.1%} less goodput: {more:.3g} s more {name}"


def _parts(scored: Scored) -> dict[str, float]:
    return asdict(scored.cost)


def _sizes(row: ExplainedPlan) -> str:
    """Blocks per stage, equal neighbours together: 4x3+2 is four stages of three and one of two."""
    runs = ((size, len(list(group))) for size, group in itertools.groupby(b - a for a, b in row.stages))
    return "+".join(f"{n}x{size}" if n > 1 else str(size) for size, n in runs) or "all"


def _limits(known: AxisLimits) -> tuple[str, ...]:
    values = ((axis, getattr(known, axis)[-1], known.why.get(axis, "")) for axis in MODEL)
    return tuple(f"{axis} up to {most}: {why}" for axis, most, why in values if why)
