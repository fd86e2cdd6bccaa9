"""A lost stage comes back: its state at the base, then its steps again, from the logs of its neighbours.

The worker that stands in asks the survivors step by step, one step ahead of what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayTaskError

from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.cluster.messages import Offer
from elastic_train.cluster.reruns import Rerun
from elastic_train.cluster.saving import read_in_batches
from elastic_train.errors import GroupBroken, StateMismatch
from elastic_train.geometry.fragments import Fragments
from elastic_train.geometry.transfer import Uncovered, plan_transfer
from elastic_train.recovery.evidence import Live, Stored, Vote
from elastic_train.train.boundary.crossing import Crossing
from elastic_train.train.member import Member
from elastic_train.train.merging import merged

Parcel = tuple[Vote | None, dict[Crossing, torch.Tensor]]
"""What a sender's log has of a step for one stage, and the step's outcome where it is known."""

LOOK_S = 0.2
"""How often whoever waits for a sender looks whether the group was broken meanwhile."""


def stand_in(
    member: Member,
    open_: Callable[[Stored], Checkpoint],
    rerun: Rerun,
    senders: Sequence[Any],
    keepers: Sequence[Any],
) -> None:
    """On the training thread. What was replayed is held afterwards, as the lost worker held it."""
    replay = rerun.replay
    member.stand_in(rerun.generation, rerun.plan, rerun.stage, rerun.during)
    if replay.peers:
        _from_peers(member, Live(generation=rerun.generation, step=replay.base), keepers)
    elif replay.stored is not None:
        checkpoint = open_(replay.stored)
        needs = member.needs(checkpoint.whole(), foreign="foreign" in checkpoint.document)
        for boxes, arrays in read_in_batches(checkpoint, needs):
            member.fill(boxes, arrays)
        member.load(dict(checkpoint.document))
    else:
        member.needs()
        member.initialise()
    member.replay(rerun.step, SentByOthers(rerun, senders, member.check))


def parcel(member: Member, generation: int, stage: int, step: int) -> Parcel:
    """What a member kept for another stage in a step. Raises KeyError where that is nothing."""
    log, source = member.held.log(generation)
    sent = {crossing: log.read(crossing) for crossing in log.crossings(source, stage, step)}
    try:
        return log.vote(step), sent
    except KeyError:
        return None, sent


class SentByOthers:
    """The survivors' logs as a replay reads them. `check` raises where the group was broken."""

    def __init__(self, rerun: Rerun, senders: Sequence[Any], check: Callable[[], None]) -> None:
        self._rerun, self._senders, self._check = rerun, senders, check
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
        """Have the parcels of a step, and ask for those of the next."""
        if step == self._step:
            return
        self._ask(step)
        self._ask(step + 1)
        parcels: list[Parcel] = [self._wait(ref) for ref in self._asked.pop(step)]
        last = self._rerun.vote if step == self._rerun.step else None
        self._vote = next((vote for vote, _ in parcels if vote is not None), last)
        self._sent = {crossing: tensor for _, sent in parcels for crossing, tensor in sent.items()}
        self._step = step

    def _ask(self, step: int) -> None:
        rerun = self._rerun
        if step <= rerun.step and step not in self._asked:
            self._asked[step] = [s.sent.remote(rerun.generation, rerun.stage, step) for s in self._senders]

    def _wait(self, ref: Any) -> Parcel:
        while not ray.wait([ref], timeout=LOOK_S)[0]:
            self._check()
        try:
            return ray.get(ref)
        except RayTaskError as error:
            if isinstance(error.cause, GroupBroken | KeyError):
                raise StateMismatch(step=self._rerun.step, detail=f"a log is gone: {error.cause}") from error
            raise


def _from_peers(member: Member, base: Live, keepers: Sequence[Any]) -> None:
    offers: list[Offer] = ray.get([keeper.offer.remote(base) for keeper in keepers])
    haves = [offer.holds for offer in offers]
    needs = member.needs(Fragments.concat(haves))
    nodes = [str(number) for number in range(len(keepers))]
    moves = plan_transfer([needs], haves, need_nodes=["0"], have_nodes=nodes, same={})
    if isinstance(moves, Uncovered):
        raise StateMismatch(step=base.step, detail=f"peer memory does not hold {moves}")
    for number, keeper in enumerate(keepers):
        boxes = moves.boxes(moves.holder == number)
        if len(boxes):
            member.fill(boxes, ray.get(keeper.read.remote(base.generation, base.step, boxes)))
    member.load(merged([offer.document for offer in offers]))
