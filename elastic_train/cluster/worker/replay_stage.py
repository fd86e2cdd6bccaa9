"""Bring back a lost stage: restore its base state, then replay its steps from neighbours' logs.

The worker that stands in asks the survivors step by step, one step ahead of what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from ray.exceptions import RayTaskError

from elastic_train.checkpoint.merging import merged
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.cluster.checkpoint_io import read_in_batches
from elastic_train.cluster.messages import Offer
from elastic_train.cluster.ray_calls import answer_while
from elastic_train.cluster.stage_replays import StageReplay
from elastic_train.errors import GroupBroken, StateMismatch
from elastic_train.geometry.fragments import Fragments
from elastic_train.geometry.transfer import Uncovered, plan_transfer
from elastic_train.recovery.evidence import Live, Stored, Vote
from elastic_train.train.boundary.boundary_log import FLUSH_S
from elastic_train.train.boundary.crossing import Crossing
from elastic_train.train.member import Member
from elastic_train.train.rank_assignment import ReplayAssignment

StepLog = tuple[Vote | None, dict[Crossing, torch.Tensor]]
"""What a sender's log has of a step for one stage, and the step's outcome where it is known."""


def replay(
    member: Member,
    open_: Callable[[Stored], Checkpoint],
    stage_replay: StageReplay,
    assignment: ReplayAssignment,
    senders: Sequence[Any],
    peer_stores: Sequence[Any],
) -> None:
    """On the training thread. What was replayed is held afterwards, as the lost worker held it."""
    source = stage_replay.replay
    member.substitute(assignment)
    if source.peers:
        _from_peers(member, Live(generation=stage_replay.generation, step=source.base), peer_stores)
    elif source.stored is not None:
        checkpoint = open_(source.stored)
        needs = member.forming.needs(checkpoint.whole(), foreign="foreign" in checkpoint.document)
        for boxes, arrays in read_in_batches(checkpoint, needs):
            member.forming.fill(boxes, arrays)
        member.load(dict(checkpoint.document))
    else:
        member.forming.needs()
        member.forming.initialise()
    member.replay(stage_replay.step, SentByOthers(stage_replay, assignment, senders, member.check))


def complete(member: Member, stage_replay: StageReplay, number: int, helpers: Sequence[Any]) -> None:
    """Take what a lost rank had sent and helpers have logged: then its log is whole again."""
    (rank,) = stage_replay.ranks(number)
    lost = stage_replay.substitute.lost
    own = frozenset(lost.shares[lost.mesh.dp_index(rank)])
    stage, _ = stage_replay.replay.log.stages
    (log,) = (log for log, of in member.held.kept_logs(stage_replay.generation) if of == stage)
    for step in range(stage_replay.replay.base + 1, stage_replay.step + 1):
        for target in {stage - 1, stage + 1} & set(range(lost.mesh.pp)):
            had = log.crossings(stage, target, step)
            asked = [
                helper.sent.remote(stage_replay.generation, (target, target + 1), step) for helper in helpers
            ]
            for ref in asked:
                _, sent = _waited(ref, step, member.check)
                for crossing, tensor in sent.items():
                    if crossing.source == stage and crossing.micro_batch in own and crossing not in had:
                        log.keep(crossing, tensor)
        log.flush(FLUSH_S)  # what waits to be copied has its bounds


def step_log(
    member: Member, generation: int, stages: tuple[int, int], step: int, share: Collection[int] | None
) -> StepLog:
    """What a member kept for others' stages in a step, and the step's outcome where it knows it.

    With a `share` of these micro-batches alone, and of ties.
    """
    logs = member.held.kept_logs(generation)
    inside = range(*stages)
    sent = {
        crossing: log.read(crossing)
        for log, source in logs
        if source not in inside
        for target in inside
        for crossing in log.crossings(source, target, step)
        if share is None or crossing.kind == "tie" or crossing.micro_batch in share
    }
    votes = (log.outcome(step) for log, _ in logs)
    return next((vote for vote in votes if vote is not None), None), sent


class SentByOthers:
    """The survivors' logs as a replay reads them. `check` raises where the group was broken."""

    def __init__(
        self,
        stage_replay: StageReplay,
        assignment: ReplayAssignment,
        senders: Sequence[Any],
        check: Callable[[], None],
    ) -> None:
        self._stage_replay, self._senders, self._check = stage_replay, senders, check
        plan = assignment.substitute.plan
        share = plan.shares[plan.mesh.dp_index(assignment.rank)]
        self._share = frozenset(share) | {0}  # the first one is what a rank without any fills up with
        self._asked: dict[int, list[Any]] = {}
        self._step = 0
        self._sent: dict[Crossing, torch.Tensor] = {}
        self._vote: Vote | None = None

    def read(self, crossing: Crossing) -> torch.Tensor:
        self._turn_to(crossing.step)
        found = self._sent.get(crossing)
        if found is None:
            raise StateMismatch(step=crossing.step, detail=f"no log has {crossing}")
        return found.clone()

    def vote(self, step: int) -> Vote:
        self._turn_to(step)
        if self._vote is None:
            raise StateMismatch(step=step, detail="no log has the outcome of its vote")
        return self._vote

    def _turn_to(self, step: int) -> None:
        """Have the logs of a step, and ask for those of the next."""
        if step == self._step:
            return
        self._ask(step)
        self._ask(step + 1)
        step_logs: list[StepLog] = [self._wait(ref) for ref in self._asked.pop(step)]
        last = self._stage_replay.vote if step == self._stage_replay.step else None
        self._vote = next((vote for vote, _ in step_logs if vote is not None), last)
        self._sent = {crossing: tensor for _, sent in step_logs for crossing, tensor in sent.items()}
        self._step = step

    def _ask(self, step: int) -> None:
        stage_replay = self._stage_replay
        if step <= stage_replay.step and step not in self._asked:
            wanted = stage_replay.generation, stage_replay.replay.log.stages, step, self._share
            self._asked[step] = [sender.sent.remote(*wanted) for sender in self._senders]

    def _wait(self, ref: Any) -> StepLog:
        return _waited(ref, self._stage_replay.step, self._check)


def _waited(ref: Any, step: int, check: Callable[[], None]) -> StepLog:
    try:
        return answer_while(ref, check)
    except RayTaskError as error:
        if isinstance(error.cause, GroupBroken | KeyError):
            raise StateMismatch(step=step, detail=f"a log is gone: {error.cause}") from error
        raise


def _from_peers(member: Member, base: Live, peer_stores: Sequence[Any]) -> None:
    asked = [peer_store.offer.remote(base) for peer_store in peer_stores]
    offers: list[Offer] = [answer_while(call, member.check) for call in asked]
    haves = [offer.holds for offer in offers]
    needs = member.forming.needs(Fragments.concat(haves))
    nodes = [str(number) for number in range(len(peer_stores))]
    moves = plan_transfer([needs], haves, need_nodes=["0"], have_nodes=nodes, same={})
    if isinstance(moves, Uncovered):
        raise StateMismatch(step=base.step, detail=f"peer memory does not hold {moves}")
    for number, peer_store in enumerate(peer_stores):
        boxes = moves.boxes(moves.holder == number)
        if len(boxes):
            asked_for = peer_store.read.remote(base.generation, base.step, boxes)
            member.forming.fill(boxes, answer_while(asked_for, member.check))
    member.load(merged([offer.document for offer in offers]))
