"""Find groups that stand still and slow ranks from heartbeats.

Judging is done in `control`; here the stacks are collected and the events are posted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from elastic_train.cluster.controller.effects import Done, Effect, Effects, Ending, Lane
from elastic_train.cluster.messages import Heartbeat
from elastic_train.config import SLOWEST, Timing
from elastic_train.control.events import Cause, Event, Hung, Straggling
from elastic_train.control.hang_detection import ORDER, Mark, Stall, culprit, stalled
from elastic_train.control.states import Facts, Forming, Pausing, Running, Settling, State
from elastic_train.control.stragglers import Pace
from elastic_train.planner.plan import Plan

log = logging.getLogger(__name__)
SLACK_S = 5.0
Stacks = Callable[[tuple[str, ...]], Mapping[str, str]]


class HangWatch:
    """`stacks` asks members for their stacks, within the verdict time."""

    def __init__(
        self, timing: Timing, *, post: Callable[[Event], None], stacks: Stacks, effects: Effects
    ) -> None:
        self._timing, self._post, self._stacks, self._effects = timing, post, stacks, effects
        self._reported = 0  # the generation that was last found to stand still
        self._paced = 0
        self._pace = Pace()

    def check(self, state: State, heartbeats: Iterable[Heartbeat]) -> None:
        """Once a tick."""
        phase, facts = state.phase, state.facts
        if not isinstance(phase, Running | Pausing):
            return
        group = _group(state, phase, heartbeats)
        self._compare(facts, phase.plan, group)
        if self._reported == facts.lineage.generation or len(group) < phase.plan.world_size:
            return
        if any(self._in_user_code(s) for s in group):
            return  # it builds its data set, say, and the others wait for it
        marks = [
            Mark(worker=s.worker, rank=s.rank, step=s.step, phase=s.phase, seconds=s.phase_s) for s in group
        ]
        stall = stalled(marks, _step_s(facts, phase), self._timing)
        if stall is not None:
            self._reported = facts.lineage.generation
            nodes = {s.worker: s.node for s in group}
            self._name(facts.lineage.generation, stall, nodes)

    def moved_s(
        self, state: State, heartbeats: Iterable[Heartbeat], written_s: float | None = None
    ) -> float | None:
        """For how long no member of the group entered a phase or a micro-batch; None: nobody looks. One that
        forms a group, or owes its final report, moves while it is inside the job's own code, and a group
        whose checkpoint is written while storage takes bytes, the last of them `written_s` ago.
        """
        phase = state.phase
        if isinstance(phase, Forming):  # members mark the new generation on the way
            members = set(phase.plan.workers)
            group = [s for s in heartbeats if s.worker in members]
            return min((0.0 if s.user_code else s.phase_s for s in group), default=None)
        if isinstance(phase, Settling):
            owing = [s for s in heartbeats if s.worker in phase.pending]
            return 0.0 if any(self._in_user_code(s) for s in owing) else None
        if not isinstance(phase, Running | Pausing):
            return None
        signs = [0.0 if self._in_user_code(s) else s.phase_s for s in _group(state, phase, heartbeats)]
        return min([*signs, *(() if written_s is None else (written_s,))], default=None)

    def _in_user_code(self, member: Heartbeat) -> bool:
        """Whether a member is where only the job's own code may be, such as its data set."""
        limit = self._timing.user_code_s
        return member.user_code and member.phase not in ORDER and member.phase_s <= limit

    def _name(self, generation: int, stall: Stall, nodes: Mapping[str, str]) -> None:
        """Ends in Hung, without stacks where none could be collected."""

        def ended(ending: Ending[Mapping[str, str]]) -> None:
            if not isinstance(ending, Done):
                log.warning("no stacks of generation %d: %s", generation, ending)
            self._say(generation, stall, nodes, ending.value if isinstance(ending, Done) else {})

        self._effects.begin(
            Effect(
                name=f"the stacks of generation {generation}",
                lane=Lane.URGENT,
                within_s=self._timing.verdict_s + SLACK_S,
                call=lambda: self._stacks(tuple(nodes)),
                ended=ended,
            )
        )

    def _say(
        self, generation: int, stall: Stall, nodes: Mapping[str, str], stacks: Mapping[str, str]
    ) -> None:
        who = culprit(stall, stacks)
        at = who or stall.suspects[0]
        subject = f"{at.worker} (rank {at.rank}, node {nodes[at.worker]}) has"
        if who is None and len(stall.suspects) > 1:
            subject = f"{len(stall.suspects)} ranks have"
        cause = Cause(
            kind="hang",
            detail=f"{subject} been in {at.phase} of step {at.step} for {at.seconds:.0f} s, "
            f"{stall.limit:.0f} s are the limit",
            phase=at.phase,
            step=at.step,
            rank=at.rank if who else -1,
            node=nodes[at.worker] if who else "",
            traceback=stacks.get(at.worker, ""),
        )
        self._post(
            Hung(
                at=0.0,
                generation=generation,
                worker=who.worker if who else "",
                cause=cause,
                stacks=tuple(sorted(stacks.items())),
            )
        )

    def _compare(self, facts: Facts, plan: Plan, group: Iterable[Heartbeat]) -> None:
        """Feed each rank's own time; tell when a rank becomes slow, and when it no longer is.

        A worker that was slow in the last group, and got less work in this one, is so until it keeps up.
        """
        known = dict(facts.membership.slow)
        if self._paced != facts.lineage.generation:
            stages = {rank: plan.mesh.coordinate(rank)["pp"] for rank in range(plan.world_size)}
            slow = {rank for rank, worker in enumerate(plan.workers) if worker in known}
            self._paced, self._pace = facts.lineage.generation, Pace(stages=stages, slow=slow)
        for member in group:
            self._pace.heard(member.rank, member.paced_step, member.own_s)
        for member in group:
            told, factor = known.get(member.worker, 0.0), self._pace.slowness(member.rank)
            if factor is not None and (bool(factor) != bool(told) or factor >= SLOWEST * told > 0.0):
                self._post(
                    Straggling(
                        at=0.0,
                        generation=facts.lineage.generation,
                        worker=member.worker,
                        node=member.node,
                        rank=member.rank,
                        factor=factor,
                    )
                )


def _group(state: State, phase: Running | Pausing, heartbeats: Iterable[Heartbeat]) -> list[Heartbeat]:
    members, generation = set(phase.plan.workers), state.facts.lineage.generation
    return [s for s in heartbeats if s.generation == generation and s.worker in members]


def _step_s(facts: Facts, phase: Running | Pausing) -> float:
    """The measured time of a step of this group; 0 before its first one."""
    proven = phase.proven if isinstance(phase, Running) else True
    return facts.measured.step_s if proven else 0.0
