"""Perform Form: every member joins, fetches its part of the state from the origin, and verifies it.

The order is fixed: holders settle at one step and say what they hold; members rendezvous and say what they
need; the transfer plan says which bytes go where; members fetch them over connections of their own, and what
came is compared with what the holders have. Nothing here chooses.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from elastic_train.checkpoint.merging import merged
from elastic_train.cluster.controller.first_step import computed_by, late_ranks
from elastic_train.cluster.messages import Filled, Offer
from elastic_train.cluster.ray_calls import FETCH_S, answer
from elastic_train.cluster.stage_replays import StageReplay, stage_replays
from elastic_train.control.commands import Form, Prepare
from elastic_train.errors import ElasticTrainError, GroupBroken, StateMismatch
from elastic_train.geometry.coverage import uncovered, whole
from elastic_train.geometry.exact import exact_first
from elastic_train.geometry.fragments import Fragments
from elastic_train.geometry.transfer import Transfers, Uncovered, plan_transfer
from elastic_train.recovery.evidence import Fresh, FromStorage, Live, Mixed, PeerSnapshot
from elastic_train.train.rank_assignment import RankAssignment, ReplayAssignment

LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Participants:
    """The living workers: handles, nodes and addresses by name."""

    peer_stores: Mapping[str, Any]  # by node
    handles: Mapping[str, Any]
    nodes: Mapping[str, str]
    addresses: Mapping[str, str]
    progress_s: float = 0.0  # how much longer than anything else a replay may take
    replayers: int | None = None  # workers that share a replay at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long members may take for an answer. While `busy` says that one of them is inside the job's own
    code, which has a deadline of its own, no time passes.
    """

    limit_s: float
    busy: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True, kw_only=True)
class FormResult:
    """Every rank has its state of `step`."""

    step: int
    notes: tuple[str, ...]
    transfer_s: float = 0.0  # until the last rank had fetched and proved its state; 0 where some are late
    near_bytes: int = 0  # that came from memory of the rank's own node
    far_bytes: int = 0  # and of other nodes
    by_module: bool | None = None  # how initial values were given, where any were
    parts: tuple[tuple[str, float], ...] = ()  # what the seconds went to
    late: int = 0  # ranks that are given their state beside the first step
    computed: int = 0  # micro-batches of it whose gradients ranks have already


def form(command: Form, participants: Participants, store: tuple[str, int], patience: Patience) -> FormResult:
    """Raises what a member raised, GroupBroken when the deadline passes, StateMismatch on a wrong digest."""
    _check_there((*command.plan.workers, *command.holders), command.generation, participants)
    match command.origin:
        case Live() as origin:
            return _from_held(command, origin, command.holders, participants, store, patience)
        case Mixed() as origin:
            replayers = _replayed(command, origin, participants, store, patience)
            names, participants = _with_peer_stores(command, participants, origin.peers)
            holders = tuple(dict.fromkeys((*command.holders, *names, *replayers)))
            return _from_held(command, origin, holders, participants, store, patience)
        case FromStorage(stored=stored):
            _join(command, participants, store, None, patience)
            calls = [h.restore.remote(command.generation, stored) for h in _members(command, participants)]
        case Fresh():
            _join(command, participants, store, None, patience)
            calls = [h.initialise.remote(command.generation) for h in _members(command, participants)]
    return _agree(wait_all(calls, command.generation, patience), None)


def _check_there(workers: Sequence[str], generation: int, participants: Participants) -> None:
    missing = [worker for worker in workers if worker not in participants.handles]
    if missing:
        raise GroupBroken(generation=generation, reason=f"{missing[0]} is gone before the group formed")


def _members(command: Form, participants: Participants) -> list[Any]:
    return [participants.handles[worker] for worker in command.plan.workers]


def _join(
    command: Form,
    participants: Participants,
    store: tuple[str, int],
    states: Fragments | None,
    patience: Patience,
) -> list[Fragments]:
    calls = [
        participants.handles[worker].join.remote(assignment, states)
        for worker, assignment in _assignments(command, participants, store)
    ]
    return wait_all(calls, command.generation, patience)


def _assignments(
    command: Form | Prepare, participants: Participants, store: tuple[str, int]
) -> Iterator[tuple[str, RankAssignment]]:
    """The rank of each worker of a group that forms, or is made ready."""
    for rank, worker in enumerate(command.plan.workers):
        yield (
            worker,
            RankAssignment(
                generation=command.generation,
                rank=rank,
                plan=command.plan,
                store_host=store[0],
                store_port=store[1],
                address=participants.addresses[worker],
                step=command.step if isinstance(command, Prepare) else command.lineage[-1][1],
                by_module=command.by_module,
                prepared=command.number if isinstance(command, Prepare) else command.prepared,
            ),
        )


def prepare(command: Prepare, participants: Participants, store: tuple[str, int], patience: Patience) -> None:
    """Make a group ready beside the one that trains. Raises what a member raised, and as `form` does."""
    _check_there(command.plan.workers, command.generation, participants)
    calls = [
        participants.handles[worker].prepare.remote(assignment)
        for worker, assignment in _assignments(command, participants, store)
    ]
    wait_all(calls, command.generation, patience)


def _replayed(
    command: Form, origin: Mixed, participants: Participants, store: tuple[str, int], patience: Patience
) -> tuple[str, ...]:
    """Have the lost stages replayed; the workers that hold them then."""
    if not origin.replays:
        return ()
    rounds = stage_replays(command, origin, participants.replayers)
    if not rounds:
        detail = "there are fewer workers than a lost stage had ranks"
        raise StateMismatch(step=origin.step, detail=detail)  # no log helps then
    for together in rounds:
        calls = [
            call for stage_replay in together for call in _replay(command, stage_replay, participants, store)
        ]
        wait_all(
            calls, command.generation, replace(patience, limit_s=patience.limit_s + participants.progress_s)
        )
        completed = [
            participants.handles[holder].complete.remote(
                stage_replay, number, _others(participants, stage_replay, holder)
            )
            for stage_replay in together
            if stage_replay.shared
            for number, holder in enumerate(stage_replay.holders)
        ]
        wait_all(completed, command.generation, patience)
    return tuple(
        holder for together in rounds for stage_replay in together for holder in stage_replay.holders
    )


def _replay(
    command: Form, stage_replay: StageReplay, participants: Participants, store: tuple[str, int]
) -> list[ray.ObjectRef]:
    """Have the workers of a replay begin."""
    gone = [
        name
        for name in (*stage_replay.replay.log.senders, *stage_replay.workers)
        if name not in participants.handles
    ]
    if gone:
        raise GroupBroken(generation=command.generation, reason=f"{gone[0]} is gone, with its log")
    senders = [participants.handles[sender] for sender in stage_replay.replay.log.senders]
    peer_stores = [
        participants.peer_stores[node] for node in _nodes_of(command, participants, stage_replay.replay.peers)
    ]
    assignments = [
        ReplayAssignment(
            generation=stage_replay.generation,
            during=stage_replay.during,
            substitute=stage_replay.substitute,
            number=number,
            ranks=stage_replay.ranks(number),
            store_host=store[0],
            store_port=store[1],
            address=participants.addresses[worker],
            by_module=command.by_module,
        )
        for number, worker in enumerate(stage_replay.workers)
    ]
    return [
        participants.handles[worker].replay.remote(stage_replay, assignment, senders, peer_stores)
        for worker, assignment in zip(stage_replay.workers, assignments, strict=True)
    ]


def _others(participants: Participants, stage_replay: StageReplay, holder: str) -> list[Any]:
    return [participants.handles[worker] for worker in stage_replay.workers if worker != holder]


def _nodes_of(
    command: Form, participants: Participants, snapshots: Sequence[PeerSnapshot]
) -> tuple[str, ...]:
    """The nodes whose peer stores hold snapshots."""
    nodes = tuple(dict.fromkeys(snapshot.peer_store for snapshot in snapshots))
    gone = [node for node in nodes if node not in participants.peer_stores]
    if gone:
        raise GroupBroken(generation=command.generation, reason=f"the peer store of {gone[0]} is gone")
    return nodes


def _with_peer_stores(
    command: Form, participants: Participants, peers: Sequence[PeerSnapshot]
) -> tuple[tuple[str, ...], Participants]:
    """The peer stores that the origin names, as holders beside the workers: they answer the same
    questions.
    """
    nodes = _nodes_of(command, participants, peers)
    names = {f"peer_store/{node}": node for node in nodes}
    return tuple(names), replace(
        participants,
        handles={
            **participants.handles,
            **{name: participants.peer_stores[node] for name, node in names.items()},
        },
        nodes={**participants.nodes, **names},
    )


def _from_held(
    command: Form,
    origin: Live | Mixed,
    holders: tuple[str, ...],
    participants: Participants,
    store: tuple[str, int],
    patience: Patience,
) -> FormResult:
    marks = [time.monotonic()]
    live = Live(generation=origin.generation, step=origin.step, vote=origin.vote, undo=origin.undo)
    offers: list[Offer] = wait_all(
        [participants.handles[worker].offer.remote(live) for worker in holders],
        command.generation,
        patience,
    )
    haves = exact_first([offer.holds for offer in offers], [offer.undone for offer in offers])
    everything = whole(Fragments.concat(haves))
    stored = origin.stored if isinstance(origin, Mixed) else None
    if stored is not None:  # the checkpoint is one more holder, of what nobody else has
        (offer,) = wait_all(
            [_members(command, participants)[0].kept.remote(stored)], command.generation, patience
        )
        offers.append(offer)
        everything = offer.holds
        gaps = uncovered(everything, Fragments.concat(haves))
        haves.append(gaps.fragments if gaps is not None else everything.take(np.zeros(0, np.int64)))
    document = merged([offer.document for offer in offers])
    marks.append(time.monotonic())
    needs = _join(command, participants, store, everything, patience)
    marks.append(time.monotonic())
    nodes = [*(participants.nodes[worker] for worker in holders), *([] if stored is None else [""])]
    same = {
        rank: holders.index(worker) for rank, worker in enumerate(command.plan.workers) if worker in holders
    }
    late = frozenset[int]() if stored is not None else late_ranks(command.plan, everything, offers, same)
    if late:  # they are given to during the first step, by ranks that take part in it
        serving = {same[rank] for rank in range(command.plan.world_size) if rank not in late}
        haves = [
            have if i in serving else have.take(np.zeros(len(have), bool)) for i, have in enumerate(haves)
        ]
    computed = {} if stored is not None else computed_by(command.plan, offers, same, late)
    moves = _plan(command, needs, haves, list(command.plan.nodes), nodes, same)
    calls = []
    for rank, worker in enumerate(command.plan.workers):
        mine = moves.rank == rank
        others = [
            (participants.handles[holder], moves.boxes(mine & (moves.holder == i)))
            for i, holder in enumerate(holders)
            if i != same.get(rank) and (mine & (moves.holder == i)).any()
        ]
        own = moves.boxes(mine & (moves.holder == same.get(rank, -1)))
        rest = None if stored is None else (stored, moves.boxes(mine & (moves.holder == len(holders))))
        calls.append(
            participants.handles[worker].gather.remote(
                command.generation, live, own, others, document, rest=rest, late=late, computed=computed
            )
        )
    filled = wait_all(calls, command.generation, patience)
    marks.append(time.monotonic())
    # With a checkpoint, exact parts of one step are together what was saved, to the bit.
    expected = offers[-1].document.get("state_digest") if stored is not None else None
    near, far = _distances(moves, command.plan.nodes, nodes)
    took = [after - before for before, after in itertools.pairwise(marks)]
    parts = tuple(zip(("offered", "joined", "filled"), took, strict=True))
    found = replace(
        _agree(filled, expected),
        near_bytes=near,
        far_bytes=far,
        parts=parts,
        computed=sum(map(len, computed.values())),
    )
    return replace(found, transfer_s=0.0, late=len(late)) if late else found


def _distances(moves: Transfers, need_nodes: Sequence[str], have_nodes: Sequence[str]) -> tuple[int, int]:
    """Bytes that come from memory of their rank's own node, and of others; those of storage are neither."""
    source = np.array(have_nodes)[moves.holder]
    near = source == np.array(need_nodes)[moves.rank]
    return int(moves.nbytes[near].sum()), int(moves.nbytes[~near & (source != "")].sum())


def _plan(
    command: Form,
    needs: Sequence[Fragments],
    haves: Sequence[Fragments],
    need_nodes: Sequence[str],
    have_nodes: Sequence[str],
    same: Mapping[int, int],
) -> Transfers:
    moves = plan_transfer(needs, haves, need_nodes=need_nodes, have_nodes=have_nodes, same=same)
    if isinstance(moves, Uncovered):
        raise StateMismatch(step=command.lineage[-1][1], detail=f"the survivors do not hold {moves}")
    return moves


def _agree(filled: Sequence[Filled], expected: int | None) -> FormResult:
    digests = {f.digest for f in filled}
    step = filled[0].step
    if len(digests) != 1 or len({f.step for f in filled}) != 1:
        raise StateMismatch(step=step, detail="the ranks disagree on the digest of the whole state")
    digest = filled[0].digest
    if expected is not None and digest != expected:
        raise StateMismatch(step=step, detail=f"digest {digest or 0:016x}, {expected:016x} was kept")
    notes = dict.fromkeys(note for f in filled for note in f.notes)
    transfer_s = max(f.seconds for f in filled)
    return FormResult(
        step=step,
        notes=tuple(notes),
        transfer_s=transfer_s,
        by_module=filled[0].by_module,
    )


def wait_all(refs: Sequence[ray.ObjectRef], generation: int, patience: Patience) -> list[Any]:
    """Results in order. The first failure is raised at once, without waiting for the others."""
    pending, waited = list(refs), 0.0
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=LOOK_S)
        if not done:
            waited += 0.0 if patience.busy() else LOOK_S
            if waited > patience.limit_s:
                raise GroupBroken(
                    generation=generation,
                    reason=f"{len(pending)} members did not answer within {patience.limit_s:.0f} s",
                )
            continue
        waited = 0.0
        try:
            answer(done[0], FETCH_S)
        except GetTimeoutError:
            raise GroupBroken(generation=generation, reason="an answer could not be fetched") from None
        except RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, ElasticTrainError) else error) from None
    return [answer(ref, FETCH_S) for ref in refs]
