"""Branch-and-bound search: candidates are scored exactly only while their bound can still win.

Every candidate has an upper bound of its goodput from columns alone. The best bound is refined - by the cut
that fits in memory, then by its place on the workers - until it is exact and still the best (best-first
branch and bound: nothing that could win is left out).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from elastic_train.axes import AXES
from elastic_train.planner.bounds import may_fit, step_seconds, totals
from elastic_train.planner.limits import AxisLimits
from elastic_train.planner.mesh_candidates import Candidates, candidates, recomputes
from elastic_train.planner.plan import Mesh
from elastic_train.planner.problem import Problem
from elastic_train.planner.scoring import Draft, Scored, Scorer
from elastic_train.planner.stage_table import StageTable

Floats = NDArray[np.float64]


class Ranking:
    """The candidates of a problem."""

    def __init__(self, problem: Problem, known: AxisLimits) -> None:
        self._problem = problem
        fleet, shape, hardware = problem.fleet, problem.shape, problem.hardware
        stages = StageTable(shape, hardware)
        self._scorer = Scorer(problem, stages)
        self.candidates = found = candidates(
            fleet,
            known,
            problem.constraints,
            problem.micro_batches,
            layers=len(shape.layers),
            kinds=recomputes(problem.recompute, shape, hardware),
            virtuals=problem.virtual,
            zero_bubble=problem.zero_bubble,
        )
        self._bounds = totals(found, stages)
        steps = step_seconds(
            found,
            self._bounds,
            shape,
            hardware,
            fleet,
            rounds=self._rounds(found),
            micro_batches=problem.micro_batches,
        )
        self._corrections = self._corrected(found)
        self._goodput = problem.outlook.share(self._least_cost(found)) / (steps * self._corrections)
        self._may = np.ones(len(found), bool)
        if hardware.memory_bytes is not None:
            self._may = may_fit(found, self._bounds, hardware.memory_bytes)
        self._stages, self._fleet = stages, fleet

    def best(self, slack: float = 0.0, live_among: int = 0) -> Iterator[Scored]:
        """In order of goodput; equal ones in the order of the columns.

        With `slack`, candidates that may be better by no more than that share are not looked at before
        one is returned. With `live_among`, only those whose new shards fit beside the old, of so many.
        """
        left = live_among
        indices = np.flatnonzero(self._may)
        order = indices[np.argsort(-self._goodput[indices], kind="stable")].tolist()
        heap: list[tuple[float, int, Draft | Scored | None]] = []  # (-goodput, index, how exact)
        at = 0
        while heap or at < len(order):
            if at < len(order) and (not heap or -self._goodput[order[at]] <= heap[0][0]):
                better = self._refined(order[at])
                if better > 0:
                    heapq.heappush(heap, (-better, order[at], None))
                at += 1
                continue
            _, i, known = heapq.heappop(heap)
            if isinstance(known, Scored):
                yield known
                continue
            if known is None:
                closer = self._scorer.draft(self.candidates.at(i))
                left -= 1
                if live_among and not closer.live:
                    if left <= 0:
                        return
                    continue
            else:
                closer = self._scorer.score(known)
            bonus = 1 + slack * isinstance(closer, Scored)
            heapq.heappush(heap, (-closer.goodput * bonus, i, closer))

    def any_fits(self) -> bool:
        """Whether some candidate fits in memory, the ones that need least of it first."""
        indices = np.flatnonzero(self._may)
        found = self.candidates
        need = -(found.pp * found.tp * found.shards)[indices]
        order = indices[np.lexsort((found.virtual[indices], -found.recompute[indices], need))]
        return any(self._refined(i) > 0 for i in order.tolist())

    def stay(self) -> Scored | None:
        """The previous plan, where all its workers are still there and it fits."""
        return self._scorer.stay()

    def _refined(self, i: int) -> float:
        """The bound once the cut has to fit in memory; 0 where none fits."""
        candidate, one = self.candidates.at(i), slice(i, i + 1)
        slowest = self._stages.slowest(candidate, int(self.candidates.rounds[i]))
        bound = float(self._goodput[i])
        if not np.isfinite(slowest):
            return 0.0
        if candidate.virtual > 1 or slowest <= self._bounds.slowest_s[i]:
            return bound
        row = Candidates(**{name: getattr(self.candidates, name)[one] for name in Candidates.__slots__})
        known = {name: getattr(self._bounds, name)[one] for name in type(self._bounds).__slots__}
        tighter = replace(type(self._bounds)(**known), slowest_s=np.array([slowest]))
        problem = self._problem
        (step,) = step_seconds(
            row,
            tighter,
            problem.shape,
            problem.hardware,
            self._fleet,
            rounds=self._rounds(row),
            micro_batches=problem.micro_batches,
        )
        cost = float(self._least_cost(row)[0])
        return min(bound, problem.outlook.goodput(float(step * self._corrections[i]), cost))

    def _corrected(self, found: Candidates) -> Floats:
        """What the run's own measures make of the predicted seconds, by candidate."""
        factors = np.ones(len(found))
        for mesh in {pace.mesh for pace in self._problem.outlook.paces}:
            for i in np.flatnonzero(_is(found, mesh)).tolist():
                factors[i] = self._scorer.correction(found.at(i))
        return factors

    def _rounds(self, found: Candidates) -> Floats:
        """Micro-batches of the slowest pipeline in times of a worker of speed 1, at least."""
        speeds = [slot.speed for slot in self._problem.worker_slots]
        if min(speeds) == max(speeds):
            return found.rounds / max(speeds)
        return self._problem.micro_batches / (found.dp_replicate * found.dp_shard) / max(speeds)

    def _least_cost(self, found: Candidates) -> Floats:
        """Seconds that a change to a candidate costs at least."""
        outlook, previous = self._problem.outlook, self._problem.previous
        cost = np.full(len(found), 0.0 if previous is None else outlook.form_s)
        if previous is not None:
            cost[_is(found, previous.mesh)] = 0.0
        return cost + np.where(found.dp_replicate == 1, outlook.lost_s, 0.0)


def _is(found: Candidates, mesh: Mesh) -> NDArray[np.bool_]:
    same = np.ones(len(found), bool)
    for axis in AXES:
        same &= getattr(found, axis) == getattr(mesh, axis)
    return same
