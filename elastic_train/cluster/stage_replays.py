"""Assign workers to replay lost pipeline stages. The controller's part, which loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.control.commands import Form
from elastic_train.planner.plan import Plan
from elastic_train.recovery.evidence import Mixed, Replay, Vote
from elastic_train.recovery.rank_coverage import part
from elastic_train.recovery.substitute_plan import Substitute, substitute


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReplay:
    """Run lost stages of `generation` again up to `step`, while generation `during` forms.

    `vote` is the outcome of the last step, which the senders may not know. `workers[i]` computes rank i of
    those that stand in.
    """

    during: int
    generation: int
    step: int
    vote: Vote | None
    replay: Replay
    substitute: Substitute
    workers: tuple[str, ...]

    def ranks(self, number: int) -> tuple[int, ...]:
        """The ranks of the lost plan whose parts are gone and that worker `number` brings back."""
        mesh = self.substitute.lost.mesh
        return tuple(
            rank for rank in self.substitute.substituted_ranks(number) if part(mesh, rank) in self.replay.lost
        )

    @property
    def holders(self) -> tuple[str, ...]:
        """The workers that hold something new afterwards."""
        return tuple(worker for n, worker in enumerate(self.workers) if self.ranks(n))

    @property
    def shared(self) -> bool:
        """Whether some only help, with a part of the log that the holders don't have then."""
        helpers = any(not self.substitute.substituted_ranks(n) for n in range(len(self.workers)))
        return self.replay.log.width == 1 and helpers


def stage_replays(
    command: Form, origin: Mixed, limit: int | None = None
) -> tuple[tuple[StageReplay, ...], ...]:
    """Who replays what, at most `limit` workers a stage: rounds in turn, of replays side by side.

    Everybody computes where there are replays enough to share the workers among, and where they are too few
    for that, they take turns. Empty where a stage has more ranks than there are workers.
    """
    lost = command.replayed
    assert lost is not None
    idle = [worker for worker in command.plan.workers if worker not in command.holders]
    workers = [*idle, *command.holders]
    if limit is not None:
        limit = max(limit, lost.mesh.size // lost.mesh.pp)
    teams = _teams(lost, origin.replays, workers, limit)
    made: list[StageReplay] = []
    for number, replay in enumerate(origin.replays):
        team = _seated(command, lost, replay, teams[number] if teams is not None else workers[:limit])
        found = substitute(lost, replay.log.stages, team, exact=replay.exact)
        if found is None:
            return ()
        made.append(
            StageReplay(
                during=command.generation,
                generation=origin.generation,
                step=origin.step,
                vote=origin.vote,
                replay=replay,
                substitute=found,
                workers=tuple(team[: len(found.ranks)]),
            )
        )
    return (tuple(made),) if teams is not None else tuple((stage_replay,) for stage_replay in made)


def _teams(
    lost: Plan, replays: Sequence[Replay], workers: Sequence[str], limit: int | None
) -> list[list[str]] | None:
    """Workers by replay, as many for each; None where they are too few to work side by side."""
    size = lost.mesh.size // lost.mesh.pp
    each = len(workers) // len(replays)
    if each < size:
        return None
    return [list(workers[n :: len(replays)])[:limit] for n in range(len(replays))]


def _seated(command: Form, lost: Plan, replay: Replay, team: Sequence[str]) -> list[str]:
    """In the order of the stage's ranks: who gets a rank's part in the new plan anyway brings it back.

    Only where the new plan is the lost one on other workers. Newcomers come before those that hold something.
    """
    rest = list(team)
    plan = command.plan
    if (plan.mesh, plan.stages) != (lost.mesh, lost.stages):
        return rest
    size = lost.mesh.size // lost.mesh.pp
    stages = sorted({stage for stage, _ in replay.lost})
    owners = plan.workers[stages[0] * size : (stages[0] + 1) * size]
    if all(owner in rest for owner in owners):
        return [*owners, *(worker for worker in rest if worker not in owners)]
    return rest
