"""One candidate looked at closely: stages, memory, place on the workers, quotas, time, bytes to move."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from elastic_train.planner.candidates import Candidate
from elastic_train.planner.cost import Cost, Work, cost_of
from elastic_train.planner.hardware import Fleet, Hardware
from elastic_train.planner.memory import Memory
from elastic_train.planner.outlook import Outlook
from elastic_train.planner.place import place
from elastic_train.planner.plan import Mesh, Plan, Seat, even_shares
from elastic_train.planner.quotas import quotas, shares_of, speeds_of
from elastic_train.planner.rows import rows
from elastic_train.planner.shape import ModelShape
from elastic_train.planner.stage_table import StageTable, stage_seconds
from elastic_train.planner.transition import Held, Moves, even_stages, moves, shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A plan and what it is worth."""

    plan: Plan
    memory: Memory
    cost: Cost
    moves: Moves
    change_s: float  # that the change takes, and that a lost worker costs where its part has no copy
    goodput: float  # steps per second of the time until the next change
    moves_live: bool  # old shards fit beside the new ones


class Scorer:
    """Scores candidates of one problem."""

    def __init__(
        self,
        seats: Sequence[Seat],
        shape: ModelShape,
        hardware: Hardware,
        micro_batches: int,
        outlook: Outlook,
        previous: Plan | None,
        stages: StageTable,
    ) -> None:
        self._seats, self._shape, self._hardware = tuple(seats), shape, hardware
        self._micro_batches, self._outlook, self._previous = micro_batches, outlook, previous
        self._stages, self._fleet = stages, Fleet.of(seats)
        self._blocks = tuple(rows(shape, Mesh()).state.tolist())
        self._held = 0 if previous is None else self._memory_of(previous).state

    def score(self, candidate: Candidate) -> Scored:
        """The candidate with its best cut that fits, on the seats where most bytes stay."""
        rounds = -(-self._micro_batches // candidate.mesh.dp)
        positions = self._stages.cut(candidate, rounds)
        ranges = _blocks(positions)
        held = Held(mesh=candidate.mesh, stages=ranges, virtual=candidate.virtual)
        common = None if self._previous is None else shared(Held.by(self._previous), held, self._blocks)
        ranks = place(self._seats, candidate.mesh, self._previous, common)
        plan = Plan(
            mesh=candidate.mesh,
            workers=tuple(seat.worker for seat in ranks),
            nodes=tuple(seat.node for seat in ranks),
            shares=self._shares(candidate, ranks),
            stages=ranges if candidate.mesh.pp > 1 else (),
            virtual=candidate.virtual,
            schedule=candidate.schedule,
            recompute=candidate.recompute,
        )
        return self._scored(plan, candidate, positions, ranks)

    def stay(self) -> Scored | None:
        """The previous plan as it is; None where a worker of it is gone or it doesn't fit."""
        plan, by_name = self._previous, {seat.worker: seat for seat in self._seats}
        if plan is None or not set(plan.workers) <= by_name.keys():
            return None
        candidate = Candidate(mesh=plan.mesh, virtual=plan.virtual, recompute=plan.recompute)
        ranks = tuple(by_name[worker] for worker in plan.workers)
        scored = self._scored(plan, candidate, self._positions(plan), ranks)
        there = self._hardware.memory_bytes
        return scored if there is None or scored.memory.training <= there else None

    def _scored(
        self, plan: Plan, candidate: Candidate, positions: tuple[int, ...], ranks: Sequence[Seat]
    ) -> Scored:
        stays = self._previous is not None and plan.workers == self._previous.workers
        stays = stays and self._previous is not None and Held.by(plan) == Held.by(self._previous)
        memory = self._stages.memory(candidate, plan.rounds).of(positions, plan.mesh.pp)
        if not stays:
            memory = replace(memory, held=self._held)
        cost = self._cost(plan, candidate, positions, ranks)
        moved = Moves()
        if self._previous is not None and not stays:
            moved = moves(self._previous, plan, self._blocks)
        there = self._hardware.memory_bytes
        live = there is None or stays or memory.resharding <= there
        change_s = self._change(moved, memory, stays=stays, live=live)
        change_s += self._outlook.lost_s if plan.mesh.dp_replicate == 1 else 0.0
        return Scored(
            plan=plan,
            memory=memory,
            cost=cost,
            moves=moved,
            change_s=change_s,
            goodput=self._outlook.goodput(cost.step_s, change_s),
            moves_live=live,
        )

    def _shares(self, candidate: Candidate, ranks: Sequence[Seat]) -> tuple[tuple[int, ...], ...]:
        """Equal ones where all run equally many anyway, else by speed."""
        mesh = candidate.mesh
        if mesh.dp_shard > 1 or candidate.virtual > 1:
            return even_shares(self._micro_batches, mesh.dp)
        return shares_of(quotas(self._micro_batches, speeds_of(mesh, ranks), least=mesh.pp))

    def _cost(
        self, plan: Plan, candidate: Candidate, positions: tuple[int, ...], ranks: Sequence[Seat]
    ) -> Cost:
        mesh = plan.mesh
        lengths = [plan.rounds] * mesh.dp if mesh.dp_shard > 1 else [len(share) for share in plan.shares]
        speeds = speeds_of(mesh, ranks)
        times = stage_seconds(self._stages.of(candidate).each, positions, mesh.pp)
        memory = self._stages.memory(candidate, plan.rounds)
        stage = {
            name: stage_seconds(column, positions, mesh.pp).max()
            for name, column in (
                ("gradient_bytes", memory.rows.whole_gradients),
                ("gathered_bytes", memory.whole),
                ("elements", memory.rows.trainable),
                ("units", np.ones(len(memory.whole))),
            )
        }
        values = stage | {
            "pp": mesh.pp,
            "dp_replicate": mesh.dp_replicate,
            "dp_shard": mesh.dp_shard,
            "inner": mesh.cp * mesh.tp,
            "virtual": plan.virtual,
            "rounds": max(n / speed for n, speed in zip(lengths, speeds, strict=True)),
            "slowest_s": times.max(),
            "all_s": times.sum(),
        }
        work = Work(**{name: np.array([float(value)]) for name, value in values.items()})
        return cost_of(self._shape, self._hardware, self._fleet, work)

    def _change(self, moved: Moves, memory: Memory, *, stays: bool, live: bool) -> float:
        if self._previous is None or stays:
            return 0.0
        rate = self._hardware.between.bytes_per_s / max(self._fleet.sizes)
        moving = moved.most / rate if live else memory.state / self._outlook.storage_bytes_per_s
        return self._outlook.form_s + moving

    def _memory_of(self, plan: Plan) -> Memory:
        candidate = Candidate(mesh=plan.mesh, virtual=plan.virtual, recompute=plan.recompute)
        return self._stages.memory(candidate, plan.rounds).of(self._positions(plan), plan.mesh.pp)

    def _positions(self, plan: Plan) -> tuple[int, ...]:
        """The plan's cuts as positions between layers."""
        layers = len(self._shape.layers)
        inner = [1 + stop for _, stop in even_stages(Held.by(plan), layers - 2)[:-1]]
        return (0, *inner, layers)


def _blocks(positions: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Positions between layers as ranges of blocks: the first layer and the last are none."""
    last = positions[-1] - 2
    inner = [min(max(position - 1, 0), last) for position in positions]
    return tuple(itertools.pairwise(inner))
