"""Data-parallel plans, for a model whose layers are not known."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elastic_train.axes import BATCH
from elastic_train.config import Parallelism
from elastic_train.planner.goodput_model import more
from elastic_train.planner.memory_fit import Fit
from elastic_train.planner.memory_model import memory_per_worker
from elastic_train.planner.meshes import impossible, meshes
from elastic_train.planner.model_shape import ModelShape
from elastic_train.planner.plan import Infeasible, Mesh, Plan, counted
from elastic_train.planner.question import Planned, Question
from elastic_train.planner.quotas import shares_by_speed, slowest_end
from elastic_train.planner.rank_placement import place
from elastic_train.planner.state_moves import moves

APART = "; old shards do not fit beside new ones"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """The data-parallel plan of a run for the workers that are there.

    Everything on every worker where that fits, because then any survivor holds all of it; else at least two
    copies, each cut over part of the workers; else one copy. Of equals, the mesh that uses most workers, with
    the fewest shards. Meshes whose new shards fit beside the old ones come first. The plan that is held is
    left only for one of more goodput; a step is taken to last as long as the slowest worker's share of
    micro-batches, which is what a change gains at the most.
    """

    micro_batches: int
    constraints: Parallelism = field(default_factory=Parallelism)
    shape: ModelShape | None = None
    memory_bytes: int | None = None
    bytes_per_s: float = float("inf")  # that a worker receives, until that was seen

    def __call__(self, question: Question, /) -> Planned | Infeasible:
        best = self._best(question)
        stay = question.stays
        if isinstance(best, Infeasible) or stay is None or best.plan == stay or not self._holds(stay):
            return best
        outlook = question.outlook
        rate = outlook.bytes_per_s or self.bytes_per_s
        cost_s = outlook.form_s + best.moved / rate
        step, now = (_ends(plan, question) for plan in (best.plan, stay))
        gain = outlook.goodput(step, cost_s) / outlook.goodput(now, 0.0) - 1
        if best.moves_live and gain > outlook.hysteresis:
            said = f"{best.reason}; {gain:.1%} more than {stay.mesh}, {outlook.said(cost_s)}"
            return replace(best, reason=said)
        what = "other shares promise" if best.plan.mesh == stay.mesh else f"{best.plan.mesh} promises"
        why = f"{what} {more(gain)}, {outlook.said(cost_s)}"
        if not best.moves_live:
            why = f"for {best.plan.mesh}{APART.removeprefix(';')}"
        return Planned(plan=stay, reason=f"{stay.mesh} stays: {why}")

    def _best(self, question: Question) -> Planned | Infeasible:
        """The preferred mesh, whatever a change to it costs."""
        worker_slots, held = question.worker_slots, question.held
        problem = impossible(question.room, self.micro_batches, self.constraints)
        if problem is not None:
            return problem
        fit = Fit(self.shape, self.memory_bytes, held.mesh if held else None)
        possible = meshes(min(question.room, self.micro_batches), self.constraints)
        mesh = next((m for m in possible if fit.fits(m, live=True)), None)
        moves_live = mesh is not None
        mesh = mesh or next((m for m in possible if fit.fits(m, live=False)), None)
        if mesh is None:
            return fit.infeasible(possible, len(worker_slots))
        chosen = place(worker_slots, mesh, held)
        plan = Plan(
            mesh=mesh,
            workers=tuple(slot.worker for slot in chosen),
            nodes=tuple(slot.node for slot in chosen),
            shares=shares_by_speed(self.micro_batches, mesh, chosen),
        )
        apart = "" if moves_live else APART
        reason = (
            f"{mesh} on {mesh.size} of {counted(len(worker_slots), 'worker')}: {self._why(mesh)}"
            f"{self._idle(mesh, question)}{fit.used(mesh)}{apart}"
        )
        return Planned(plan=plan, reason=reason, moves_live=moves_live, moved=self._moved(held, plan))

    def _moved(self, held: Plan | None, plan: Plan) -> float:
        if held is None or self.shape is None:
            return 0.0
        state = memory_per_worker(self.shape, Mesh()).state
        return moves(held, plan, (0.0, float(state), 0.0)).most

    def _holds(self, plan: Plan) -> bool:
        """Whether a plan is one that could be chosen here."""
        return plan.mesh.dp == plan.mesh.size and Fit(self.shape, self.memory_bytes, None).fits(
            plan.mesh, live=False
        )

    def _why(self, mesh: Mesh) -> str:
        asked = _asked(self.constraints)
        if asked:
            return f"as {asked} asks"
        if mesh.dp_shard == 1:
            return "each worker holds everything"
        if mesh.dp_replicate > 1:
            return f"everything does not fit on one worker, {mesh.dp_replicate} copies do on {mesh.size}"
        return "no two copies fit, so the loss of a worker costs the steps since the last save"

    def _idle(self, mesh: Mesh, question: Question) -> str:
        """Why workers are left out, as a part of a sentence."""
        idle = len(question.worker_slots) - mesh.size
        if idle == 0:
            return ""
        if mesh.size == self.micro_batches:
            return f", {idle} idle because a step has {self.micro_batches} micro-batches"
        if mesh.size == question.most:
            return f", {idle} idle because {question.most} are asked for"
        if self.constraints.dp_replicate and self.constraints.dp_shard:
            return f", {idle} idle"
        return f", {idle} idle because they fill no whole copy of {mesh.dp_shard} shards"


def _ends(plan: Plan, question: Question) -> float:
    """How long a step of a plan takes on these workers, in times of a micro-batch at speed 1."""
    by_name = {slot.worker: slot for slot in question.worker_slots}
    return slowest_end(plan.shares, plan.mesh, [by_name[worker] for worker in plan.workers])


def _asked(constraints: Parallelism) -> str:
    named = ((axis, getattr(constraints, axis)) for axis in BATCH)
    return " x ".join(f"{axis}={value}" for axis, value in named if value is not None)
