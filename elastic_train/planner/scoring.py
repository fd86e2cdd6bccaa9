"""Scores one candidate: stages, memory, placement on workers, quotas, step time, bytes to move."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from elastic_train.planner.cost import Cost, StepWork, cost_of
from elastic_train.planner.memory_model import WorkerMemory
from elastic_train.planner.mesh_candidates import Candidate
from elastic_train.planner.plan import Mesh, Plan, WorkerSlot, even_shares
from elastic_train.planner.problem import Problem
from elastic_train.planner.quotas import shares_by_speed, slowest_end
from elastic_train.planner.rank_placement import place
from elastic_train.planner.rows import Floats, rows
from elastic_train.planner.stage_table import StageTable, by_pp
from elastic_train.planner.state_moves import (
    HeldParts,
    Moves,
    even_stages,
    least_moved,
    moves,
    needed,
    part_of,
    shared,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """A candidate before it has a place on the workers: what no place can better."""

    candidate: Candidate
    positions: tuple[int, ...]
    held: HeldParts
    common: Floats | None  # bytes that parts of the previous plan and its parts share
    memory: WorkerMemory
    cost: Cost
    live: bool
    goodput: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A plan and what it is worth."""

    plan: Plan
    memory: WorkerMemory
    cost: Cost
    moves: Moves
    change_s: float  # that the change takes, and that a lost worker costs where its part has no copy
    goodput: float  # steps per second of the time until the next change
    moves_live: bool  # old shards fit beside the new ones


class Scorer:
    """Scores candidates of one problem."""

    def __init__(self, problem: Problem, stages: StageTable) -> None:
        self._problem, self._stages = problem, stages
        self._fleet = problem.fleet
        self._blocks = tuple(rows(stages.tensors, Mesh()).state.tolist())
        self._speeds = {slot.speed for slot in problem.worker_slots}
        previous, names = problem.previous, {slot.worker for slot in problem.worker_slots}
        self._old = None if previous is None else HeldParts.by(previous)
        self._held = 0 if previous is None else self.memory_of(previous).state
        kept = () if previous is None else enumerate(previous.workers)
        self._kept = [part_of(previous.mesh, r)[0] for r, w in kept if w in names] if previous else []
        self._whole_group = previous is not None and len(self._kept) == previous.mesh.size
        self._corrections: dict[Candidate, float] = {}
        self._corrections = self._measured()

    def draft(self, candidate: Candidate) -> Draft:
        """The candidate with its best cut that fits."""
        mesh, micro_batches = candidate.mesh, self._problem.micro_batches
        rounds = -(-micro_batches // mesh.dp)
        positions = self._stages.cut(candidate, rounds)
        held = HeldParts(
            mesh=mesh, stages=_blocks(positions) if mesh.pp > 1 else (), virtual=candidate.virtual
        )
        stays = self._whole_group and held == self._old
        memory = self._stages.memory(candidate, rounds).of(positions, mesh.pp)
        memory = replace(memory, held=0 if stays else self._held)
        common = None if self._old is None else shared(self._old, held, self._blocks)
        least = rounds if len(self._speeds) == 1 else micro_batches / mesh.dp
        cost = self._cost(candidate, positions, rounds, least / max(self._speeds))
        there = self._problem.hardware.memory_bytes
        live = there is None or stays or memory.resharding <= there
        moving = 0.0
        if common is not None and not stays:
            moving = least_moved(common[self._kept], needed(held, self._blocks), mesh.dp_replicate)
        change_s = self._change(moving, memory, mesh, stays=stays, live=live)
        return Draft(
            candidate=candidate,
            positions=positions,
            held=held,
            common=common,
            memory=memory,
            cost=cost,
            live=live,
            goodput=self._problem.outlook.goodput(cost.step_s * self.correction(candidate), change_s),
        )

    def correction(self, candidate: Candidate) -> float:
        """What the run measured of a candidate in times of what it was predicted, beside the others'.

        Only the ratio between those counts: that predictions are all too short by half decides nothing.
        """
        return self._corrections.get(candidate, 1.0)

    def score(self, draft: Draft) -> Scored:
        """The draft on the worker slots where most bytes stay."""
        candidate, problem = draft.candidate, self._problem
        ranks = place(problem.worker_slots, candidate.mesh, problem.previous, draft.common)
        plan = Plan(
            mesh=candidate.mesh,
            workers=tuple(slot.worker for slot in ranks),
            nodes=tuple(slot.node for slot in ranks),
            shares=self._shares(candidate, ranks),
            stages=draft.held.stages,
            virtual=candidate.virtual,
            schedule=candidate.schedule,
            recompute=candidate.recompute,
            sequence_parallel=problem.shape.divides_positions(candidate.mesh.tp, candidate.mesh.cp),
        )
        return self._scored(plan, draft, ranks)

    def stay(self) -> Scored | None:
        """The previous plan as it is; None where a worker of it is gone or it doesn't fit."""
        plan, there = self._problem.previous, self._problem.hardware.memory_bytes
        if plan is None or not self._whole_group:
            return None
        by_name = {slot.worker: slot for slot in self._problem.worker_slots}
        ranks = tuple(by_name[worker] for worker in plan.workers)
        candidate, positions = Candidate.of(plan), self._positions(plan)
        memory = self.memory_of(plan)
        if there is not None and memory.training > there:
            return None
        draft = Draft(
            candidate=candidate,
            positions=positions,
            held=HeldParts.by(plan),
            common=None,
            memory=memory,
            cost=self._cost(candidate, positions, plan.rounds, plan.rounds),
            live=True,
            goodput=0.0,
        )
        return self._scored(plan, draft, ranks)

    def _scored(self, plan: Plan, draft: Draft, ranks: Sequence[WorkerSlot]) -> Scored:
        previous, mesh = self._problem.previous, plan.mesh
        stays = previous is not None and (plan.workers, draft.held) == (previous.workers, self._old)
        cost, moved = draft.cost, Moves()
        if len(self._speeds) > 1 or draft.goodput == 0.0:
            end = slowest_end(plan.shares, mesh, ranks)
            cost = self._cost(draft.candidate, draft.positions, plan.rounds, end)
        if previous is not None and not stays:
            moved = moves(previous, plan, self._blocks)
        stays = stays and previous is not None and plan.shares == previous.shares
        change_s = self._change(moved.most, draft.memory, mesh, stays=stays, live=draft.live)
        return Scored(
            plan=plan,
            memory=draft.memory,
            cost=cost,
            moves=moved,
            change_s=change_s,
            goodput=self._problem.outlook.goodput(cost.step_s * self.correction(draft.candidate), change_s),
            moves_live=draft.live,
        )

    def _shares(self, candidate: Candidate, ranks: Sequence[WorkerSlot]) -> tuple[tuple[int, ...], ...]:
        """By speed, but where stages are interleaved: their schedule needs equal ones."""
        mesh, micro_batches = candidate.mesh, self._problem.micro_batches
        if candidate.virtual > 1:
            return even_shares(micro_batches, mesh.dp)
        return shares_by_speed(micro_batches, mesh, ranks, least=mesh.pp)

    def _cost(self, candidate: Candidate, positions: tuple[int, ...], rounds: int, ends: float) -> Cost:
        """`ends`: micro-batches of the slowest pipeline in times of a worker of speed 1."""
        mesh, problem = candidate.mesh, self._problem
        times = by_pp(self._stages.of(candidate).each, positions, mesh.pp)
        memory = self._stages.memory(candidate, rounds)
        values: dict[str, float] = {
            "pp": mesh.pp,
            "dp_replicate": mesh.dp_replicate,
            "dp_shard": mesh.dp_shard,
            "cp": mesh.cp,
            "inner": mesh.block_size,
            "virtual": candidate.virtual,
            "split": candidate.split,
            "rounds": ends,
            "total": rounds * mesh.dp if mesh.dp_shard > 1 else problem.micro_batches,
            "slowest_s": times.max(),
            "all_s": times.sum(),
            "gradient_bytes": by_pp(memory.rows.whole_gradients, positions, mesh.pp).max(),
            "gathered_bytes": by_pp(memory.whole, positions, mesh.pp).max(),
            "elements": by_pp(memory.rows.trainable, positions, mesh.pp).max(),
            "units": by_pp(np.ones(len(memory.whole)), positions, mesh.pp).max(),
        }
        work = StepWork(**{name: np.array([float(value)]) for name, value in values.items()})
        return cost_of(problem.shape, problem.hardware, self._fleet, work)

    def _change(self, moved: float, memory: WorkerMemory, mesh: Mesh, *, stays: bool, live: bool) -> float:
        """Seconds of a change in which one worker receives `moved` bytes, and of what a loss would cost."""
        outlook = self._problem.outlook
        lost = outlook.lost_s if mesh.dp_replicate == 1 else 0.0
        if self._old is None or stays:
            return lost
        rate = outlook.bytes_per_s or self._problem.hardware.between.bytes_per_s / max(self._fleet.sizes)
        moving = moved / rate if live else memory.state / outlook.storage_bytes_per_s
        return lost + outlook.form_s + moving

    def _measured(self) -> dict[Candidate, float]:
        """Of the plans that the run was on and that are possible now: measured over predicted, mean 1."""
        ratios: dict[Candidate, float] = {}
        for pace in self._problem.outlook.paces:
            split = pace.schedule == "ZeroBubble"
            candidate = Candidate(mesh=pace.mesh, virtual=1, recompute=pace.recompute, split=split)
            rounds = -(-self._problem.micro_batches // pace.mesh.dp)
            room = self._fleet.room(pace.mesh.block_size)
            if pace.mesh.size <= room and math.isfinite(self._stages.slowest(candidate, rounds)):
                ratios[candidate] = pace.step_s / self.draft(candidate).cost.step_s
        mean = math.exp(math.fsum(map(math.log, ratios.values())) / len(ratios)) if ratios else 1.0
        return {candidate: ratio / mean for candidate, ratio in ratios.items()}

    def memory_of(self, plan: Plan) -> WorkerMemory:
        stages = self._stages.memory(Candidate.of(plan), plan.rounds)
        return stages.of(self._positions(plan), plan.mesh.pp)

    def _positions(self, plan: Plan) -> tuple[int, ...]:
        """The plan's cuts as positions between layers."""
        layers = len(self._problem.shape.layers)
        inner = [1 + stop for _, stop in even_stages(HeldParts.by(plan), layers - 2)[:-1]]
        return (0, *inner, layers)


def memory_of(problem: Problem, plan: Plan) -> WorkerMemory:
    """What a plan is predicted to need, whether or not it fits."""
    return Scorer(problem, StageTable(problem.shape, problem.hardware)).memory_of(plan)


def _blocks(positions: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Positions between layers as ranges of blocks: the first layer and the last are none."""
    last = positions[-1] - 2
    inner = [min(max(position - 1, 0), last) for position in positions]
    return tuple(itertools.pairwise(inner))
