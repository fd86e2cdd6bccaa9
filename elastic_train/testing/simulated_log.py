"""What simulated workers of a pipeline log of what they send, and what a replay brings back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elastic_train.control.commands import Form
from elastic_train.planner.plan import Plan
from elastic_train.recovery.evidence import Live, LocalState, Mixed
from elastic_train.recovery.replayable_steps import Sent
from elastic_train.testing.simulated_group import SimulatedGroup, SimulatedWorker, vote_of


def begin(group: SimulatedGroup, forms: Mapping[int, Form]) -> None:
    """Each worker's log of the group: its own of the stage goes on, or a new one begins."""
    plan, origin = group.form.plan, group.form.origin
    if plan.mesh.pp == 1:
        return
    before = origin.generation if isinstance(origin, Live | Mixed) else 0
    same = before in forms and _pipeline(forms[before].plan) == _pipeline(plan)
    for rank, worker in enumerate(group.workers):
        held = [h for h in worker.all_held() if (h.generation, h.rank) == (before, rank)]
        goes_on = same and held and before in worker.logs
        worker.logs[group.generation] = worker.logs[before] if goes_on else group.step + 1


def sent(worker: SimulatedWorker) -> tuple[Sent, ...]:
    """What a worker's final report says of its logs."""
    return tuple(
        Sent(
            generation=held.generation,
            stage=held.rank,
            first=worker.logs[held.generation],
            last=held.step,
            ahead=held.reached == held.step + 1,
        )
        for held in worker.all_held()
        if held.generation in worker.logs and worker.logs[held.generation] <= held.step + 1
    )


def replays(form: Form) -> tuple[tuple[str, LocalState, int], ...]:
    """Who holds what once the lost stages were replayed, and from which step on it has a log then."""
    origin = form.origin
    if not isinstance(origin, Mixed):
        return ()
    idle = [worker for worker in form.plan.workers if worker not in form.holders] or list(form.plan.workers)
    return tuple(
        (
            idle[number % len(idle)],
            LocalState(
                generation=origin.generation,
                rank=replay.log.stage,
                step=origin.step,
                applied=vote_of(origin.step),
            ),
            replay.base + 1,
        )
        for number, replay in enumerate(origin.replays)
    )


def replayable(
    stage: int,
    like: LocalState,
    step: int,
    plan: Plan,
    bases: Iterable[int],
    workers: Iterable[SimulatedWorker],
) -> bool:
    """Whether the neighbours' logs reach from one of the bases to a step, the slow way."""
    everybody = list(workers)
    voted = any(
        h.applied is not None and h.generation == like.generation and h.applied.step == step
        for worker in everybody
        for h in worker.all_held()
    )
    spans: dict[int, tuple[int, int]] = {
        reported.stage: (
            reported.first,
            reported.last + (reported.ahead and voted and reported.last + 1 == step),
        )
        for worker in everybody
        for reported in sent(worker)
        if reported.generation == like.generation
    }
    needed = {stage - 1, stage + 1} & set(range(plan.mesh.pp))
    if not needed <= spans.keys():
        return False
    first, last = max(spans[n][0] for n in needed), min(spans[n][1] for n in needed)
    return last >= step and any(first - 1 <= base < step for base in bases)


def _pipeline(plan: Plan) -> object:
    return plan.mesh, plan.stages
