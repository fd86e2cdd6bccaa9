"""The planner of a run. Without the model's layers: the mesh that keeps most copies in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic_train.config import Parallelism, RunSpec
from elastic_train.planner.candidates import RECOMPUTES
from elastic_train.planner.choose import choose
from elastic_train.planner.fit import Fit
from elastic_train.planner.hardware import Hardware
from elastic_train.planner.meshes import impossible, meshes
from elastic_train.planner.outlook import Outlook
from elastic_train.planner.place import place
from elastic_train.planner.plan import Infeasible, Mesh, Plan, Recompute, Seat, even_shares
from elastic_train.planner.problem import Problem
from elastic_train.planner.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan and the sentence that explains it.

    `moves_live` is False where the old shards don't fit in memory beside the new ones: then the state has to
    come from storage.
    """

    plan: Plan
    reason: str
    moves_live: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The planner of one run, as a value: seats in, plan out.

    `seats` come in order of preference; `previous` is the plan whose shards the workers hold. With the
    model's layers and the hardware known, the plan of most predicted goodput is sought among all, with
    `recompute`, `virtual` stages per rank and split backwards (`zero_bubble`) that may be tried. Else it is
    the data-parallel plan that keeps most copies. `data_first`: that one as long as it fits and nobody asks
    for another axis.
    """

    micro_batches: int
    constraints: Parallelism = field(default_factory=Parallelism)
    shape: ModelShape | None = None
    memory_bytes: int | None = None
    hardware: Hardware | None = None
    outlook: Outlook = field(default_factory=Outlook)
    recompute: tuple[Recompute, ...] = RECOMPUTES
    virtual: tuple[int, ...] = (1, 2, 4)
    zero_bubble: bool = True
    data_first: bool = False

    def __call__(self, seats: tuple[Seat, ...], previous: Plan | None = None, /) -> Plan | Infeasible:
        choice = self.choice(seats, previous)
        return choice if isinstance(choice, Infeasible) else choice.plan

    def choice(self, seats: Sequence[Seat], previous: Plan | None = None) -> Choice | Infeasible:
        problem = self.problem(seats, previous)
        if problem is not None and self.data_first and not self.constraints.divides_the_model:
            simple = self._data_parallel(seats, previous)
            if not isinstance(simple, Infeasible):
                return simple
        if problem is not None:
            chosen = choose(problem)
            if isinstance(chosen, Infeasible):
                return chosen
            scored, reason = chosen
            return Choice(plan=scored.plan, reason=reason, moves_live=scored.moves_live)
        return self._data_parallel(seats, previous)

    def _data_parallel(self, seats: Sequence[Seat], previous: Plan | None) -> Choice | Infeasible:
        return choose_plan(
            seats,
            shape=self.shape,
            micro_batches=self.micro_batches,
            constraints=self.constraints,
            memory_bytes=self.memory_bytes,
            previous=previous,
        )

    def problem(self, seats: Sequence[Seat], previous: Plan | None = None) -> Problem | None:
        """The whole search's problem; None where layers or hardware are not known."""
        if self.shape is None or not self.shape.layers or self.hardware is None:
            return None
        return Problem(
            seats=tuple(seats),
            shape=self.shape,
            hardware=self.hardware,
            micro_batches=self.micro_batches,
            constraints=self.constraints,
            outlook=self.outlook,
            previous=previous,
            virtual=self.virtual,
            recompute=self.recompute,
            zero_bubble=self.zero_bubble,
        )


def planner_for(
    spec: RunSpec,
    *,
    shape: ModelShape | None = None,
    memory_bytes: int | None = None,
    hardware: Hardware | None = None,
    outlook: Outlook | None = None,
) -> Search:
    """The planner of a run; without a shape and a size every mesh is taken to fit.

    One stage per rank is what workers run.
    """
    return Search(
        micro_batches=spec.batch.micro_batches,
        constraints=spec.parallelism,
        shape=shape,
        memory_bytes=memory_bytes,
        hardware=hardware,
        outlook=outlook or Outlook(),
        virtual=(1,),
        data_first=True,
    )


def choose_plan(
    seats: Sequence[Seat],
    *,
    shape: ModelShape | None,
    micro_batches: int,
    constraints: Parallelism,
    memory_bytes: int | None,
    previous: Plan | None = None,
) -> Choice | Infeasible:
    """The best data-parallel plan for the workers that are there; the same arguments give the same plan.

    Everything on every worker where that fits, because then any survivor holds all of it; else at least two
    copies, each cut over part of the workers; else one copy. Of equals, the mesh that uses most workers, with
    the fewest shards. Meshes whose new shards fit beside the old ones come first.
    """
    problem = impossible(len(seats), micro_batches, constraints)
    if problem is not None:
        return problem
    fit = Fit(shape, memory_bytes, previous.mesh if previous else None)
    possible = meshes(min(len(seats), micro_batches), constraints)
    mesh = next((m for m in possible if fit.fits(m, live=True)), None)
    moves_live = mesh is not None
    mesh = mesh or next((m for m in possible if fit.fits(m, live=False)), None)
    if mesh is None:
        return fit.infeasible(possible, len(seats))
    chosen = place(seats, mesh, previous)
    plan = Plan(
        mesh=mesh,
        workers=tuple(seat.worker for seat in chosen),
        nodes=tuple(seat.node for seat in chosen),
        shares=even_shares(micro_batches, mesh.dp),
    )
    apart = "" if moves_live else "; old shards do not fit beside new ones, so the state comes from storage"
    reason = (
        f"{mesh} on {mesh.size} of {len(seats)} workers: {_why(mesh, constraints)}"
        f"{_idle(mesh, len(seats), micro_batches, constraints)}{fit.used(mesh)}{apart}"
    )
    return Choice(plan=plan, reason=reason, moves_live=moves_live)


def _why(mesh: Mesh, constraints: Parallelism) -> str:
    asked = _asked(constraints)
    if asked:
        return f"as {asked} asks"
    if mesh.dp_shard == 1:
        return "each worker holds everything"
    if mesh.dp_replicate > 1:
        return f"everything does not fit on one worker, {mesh.dp_replicate} copies do on {mesh.size}"
    return "no two copies fit, so one worker lost costs the steps since the last save"


def _idle(mesh: Mesh, workers: int, micro_batches: int, constraints: Parallelism) -> str:
    """Why workers are left out, as a part of a sentence."""
    idle = workers - mesh.size
    if idle == 0:
        return ""
    if mesh.size == micro_batches:
        return f", {idle} idle because a step has {micro_batches} micro-batches"
    if constraints.dp_replicate and constraints.dp_shard:
        return f", {idle} idle"
    return f", {idle} idle because they fill no whole copy of {mesh.dp_shard} shards"


def _asked(constraints: Parallelism) -> str:
    named = (("dp_replicate", constraints.dp_replicate), ("dp_shard", constraints.dp_shard))
    return " x ".join(f"{axis}={value}" for axis, value in named if value is not None)
