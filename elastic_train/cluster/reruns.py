"""Which worker brings back which lost stage. The controller's part, which loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_train.control.commands import Form
from elastic_train.planner.plan import Plan
from elastic_train.recovery.evidence import Mixed, Replay, Vote


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """Run a lost stage of `plan`, that of `generation`, again up to `step`, while generation `during` forms.

    `vote` is the outcome of the last step, which the senders may not know.
    """

    during: int
    generation: int
    plan: Plan
    step: int
    vote: Vote | None
    replay: Replay

    @property
    def stage(self) -> int:
        return self.replay.log.stage


def stand_ins(command: Form, origin: Mixed) -> list[tuple[Rerun, str]]:
    """Who replays what: the stage's new owner if it holds nothing yet, else another, else anybody."""
    plan, replayed = command.plan, command.replayed
    assert replayed is not None
    free = [worker for worker in plan.workers if worker not in command.holders]
    same = (plan.mesh, plan.stages) == (replayed.mesh, replayed.stages)
    found: list[tuple[Rerun, str]] = []
    for number, replay in enumerate(origin.replays):
        owner = plan.workers[replay.log.stage] if same else ""
        worker = owner if owner in free else (free or plan.workers)[number % len(free or plan.workers)]
        rerun = Rerun(
            during=command.generation,
            generation=origin.generation,
            plan=replayed,
            step=origin.step,
            vote=origin.vote,
            replay=replay,
        )
        found.append((rerun, worker))
    return found
