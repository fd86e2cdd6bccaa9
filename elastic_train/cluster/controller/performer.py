"""Perform the controller's commands as effects, each of which ends in an event."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, assert_never

import ray
from ray.exceptions import GetTimeoutError, RayError

from elastic_train.cluster.controller.abort_group import abort
from elastic_train.cluster.controller.committer import Committer
from elastic_train.cluster.controller.effect_endings import begin_aside, begin_events
from elastic_train.cluster.controller.effects import Effects, Lane
from elastic_train.cluster.controller.form_group import Participants, Patience, form, prepare
from elastic_train.cluster.controller.inbox import Inbox
from elastic_train.cluster.controller.liveness_watch import WorkerWatch
from elastic_train.cluster.controller.node_roster import Roster
from elastic_train.cluster.controller.peer_pairing import PeerPairing
from elastic_train.cluster.controller.peer_stores import HUNG_S, PeerStores
from elastic_train.cluster.controller.rendezvous_store import RendezvousStore
from elastic_train.cluster.controller.run_context import RunContext
from elastic_train.cluster.controller.worker_processes import WorkerProcesses
from elastic_train.cluster.error_causes import cause_of
from elastic_train.cluster.messages import Ready
from elastic_train.cluster.process_witness import ANSWER_S as WITNESS_S
from elastic_train.cluster.ray_calls import answer
from elastic_train.control.commands import (
    Abort,
    AskPeers,
    Command,
    Commit,
    Dismiss,
    End,
    Forget,
    Form,
    Go,
    Pause,
    Prepare,
    Prune,
    ReadLog,
    Save,
    StartWorker,
    StopWorker,
)
from elastic_train.control.events import (
    Cause,
    CheckpointRejected,
    Event,
    GroupBroken,
    GroupReady,
    NotPrepared,
    PeersReported,
    Prepared,
)
from elastic_train.errors import CheckpointError, ConfigError
from elastic_train.recovery.evidence import Fresh, Mixed, checkpoint_of

log = logging.getLogger(__name__)

QUICK_S = 30.0
"""What asks Ray alone, and no process of the run, may take."""

WAITS = 5.0
"""How many answers of all its members a group that forms waits for."""

SLACK_S = 5.0
"""What an effect may take beyond the waits that it consists of, on a busy machine."""


class Performer:
    """Starts, steers and ends the run's processes. `ended` is called with the last command."""

    def __init__(
        self,
        context: RunContext,
        *,
        inbox: Inbox,
        watch: WorkerWatch,
        committer: Committer,
        effects: Effects,
        roster: Roster,
        ended: Callable[[End], None],
    ) -> None:
        self._spec, self._inbox = context.spec, inbox
        self._watch, self._committer = watch, committer
        self._effects, self._roster, self._ended = effects, roster, ended
        self._groups: dict[int, tuple[str, ...]] = {}  # members by generation
        self._store = RendezvousStore(context.environment, start_s=context.spec.timing.form_s)
        self.peer_stores = PeerStores(context, roster)
        self.pairing = PeerPairing(self.peer_stores, effects, standby=self._standby_nodes, within_s=QUICK_S)
        self.workers = WorkerProcesses(
            context,
            effects=effects,
            roster=roster,
            watch=watch,
            post=inbox.post,
            beside=self.peer_stores.start,
            changed=self.pairing.begin,
        )

    def perform(self, command: Command) -> None:
        """Start the effect and return."""
        match command:
            case StartWorker():
                self.workers.start(command)
            case StopWorker(worker=worker, reason=reason):
                self.workers.stop(worker, reason)
            case Abort():
                self._abort(command)
            case Pause(generation=generation, save=save):
                self._tell(generation, "request", pause=True, save=save)
            case Save(generation=generation):
                self._tell(generation, "request", save=True)
            case Prepare():
                self._prepare(command)
            case Dismiss(generation=generation, number=number, workers=workers):
                for handle in filter(None, map(self.workers.handle, workers)):
                    handle.dismiss.remote(generation, number)
            case Form():
                self._form(command)
            case Go(generation=generation):
                self._go(generation)
            case Commit():
                self._committer.commit(command)
            case Prune():
                self._committer.prune(command)
            case Forget(generation=generation, step=step):
                self._tell(generation, "forget", step)
            case ReadLog():
                self._committer.read_log()
            case AskPeers():
                self._ask_peers(command)
            case End():
                self.wind_up(f"the run ended: {command.outcome}")
                self._ended(command)
            case _:
                assert_never(command)

    def wind_up(self, why: str) -> None:
        """End the run's workers and its rendezvous store. `peer_stores.stop`, which waits, ends the rest."""
        self._effects.close(Lane.STARTING, Lane.FORMING)
        self.workers.stop_all(why)
        self._store.end()

    def adopt(self, worker: str, handle: Any, ready: Ready, generation: int) -> None:
        """Take over a worker that an earlier incarnation of this controller started."""
        self._groups[generation] = (*self._groups.get(generation, ()), worker)
        self.workers.adopt(worker, handle, ready)

    def prepare_store(self) -> None:
        """Start the rendezvous store ahead of the first group, which would start one itself."""
        within_s = self._spec.timing.form_s + SLACK_S
        begin_aside(self._effects, "the rendezvous store", self._store.address, within_s=within_s)

    def stacks(self, workers: Sequence[str]) -> dict[str, str]:
        """The stack of each worker's training thread. Those that don't answer in time are left out."""
        handles = self.workers.handles()
        calls = {w: handles[w].stack.remote() for w in workers if w in handles}
        ray.wait(list(calls.values()), num_returns=max(len(calls), 1), timeout=self._spec.timing.verdict_s)
        found: dict[str, str] = {}
        for worker, call in calls.items():
            with suppress(RayError, GetTimeoutError):
                found[worker] = answer(call, 0.01)
        return found

    # -- private

    def _tell(self, generation: int, method: str, *arguments: Any, **named: Any) -> None:
        """Call a method of each member that is there, and wait for none."""
        for worker in self._groups.get(generation, ()):
            handle = self.workers.handle(worker)
            if handle is not None:
                getattr(handle, method).remote(*((generation, *arguments)), **named)

    def _go(self, generation: int) -> None:
        self.pairing.begin()
        ready = self.workers.ready()
        for worker in self._groups.get(generation, ()):
            handle = self.workers.handle(worker)
            if handle is not None:
                handle.go.remote(
                    generation, self.peer_stores.of(ready[worker].node) if worker in ready else None
                )

    def _standby_nodes(self) -> set[str]:
        """Nodes with workers, none of which has a rank."""
        group = self._groups.get(max(self._groups, default=0), ())
        ready = self.workers.ready()
        seated = {ready[worker].node for worker in group if worker in ready}
        return {one.node for one in ready.values()} - seated

    def _prepare(self, command: Prepare) -> None:
        """Ends in Prepared or NotPrepared."""
        timing, beside, number = self._spec.timing, command.beside, command.number

        def made_ready() -> Iterable[Event]:
            began, members = self._inbox.now(), frozenset(command.plan.workers)
            patience = Patience(limit_s=timing.form_s, busy=lambda: self._watch.in_user_code(members))
            prepare(command, self._participants(), self._store.address(), patience)
            seconds = self._inbox.now() - began
            return (Prepared(at=0.0, generation=beside, number=number, seconds=seconds),)

        begin_events(
            self._effects,
            f"preparation {number} of generation {command.generation}",
            Lane.FORMING,
            timing.user_code_s + timing.form_s,
            made_ready,
            post=self._inbox.post,
            otherwise=lambda cause: NotPrepared(at=0.0, generation=beside, number=number, cause=cause),
        )

    def _form(self, command: Form) -> None:
        """Ends in GroupReady, GroupBroken or CheckpointRejected."""
        self._groups[command.generation] = command.plan.workers
        nodes = command.plan.nodes
        begin_aside(
            self._effects,
            f"the peer stores of generation {command.generation}",
            lambda: self.peer_stores.ensure(nodes),
            within_s=HUNG_S + QUICK_S,
        )
        begin_events(
            self._effects,
            f"forming generation {command.generation}",
            Lane.FORMING,
            self._form_limit_s(command),
            lambda: (self._formed(command),),
            post=self._inbox.post,
            otherwise=lambda cause: GroupBroken(
                at=0.0, generation=command.generation, worker="", cause=cause
            ),
        )

    def _form_limit_s(self, command: Form) -> float:
        """When nobody waits for a group any more. What takes too long in it is noticed before that."""
        timing = self._spec.timing
        replays = isinstance(command.origin, Mixed) and command.origin.replays
        return timing.user_code_s + WAITS * timing.form_s + (timing.progress_s if replays else 0.0)

    def _formed(self, command: Form) -> Event:
        began = self._inbox.now()
        members = frozenset((*command.plan.workers, *command.holders))
        # Control judges first: it knows whether the group reads from storage, whose fault that would be.
        limit_s = self._spec.timing.form_s + SLACK_S
        patience = Patience(limit_s=limit_s, busy=lambda: self._watch.in_user_code(members))
        try:
            formed = form(command, self._participants(), self._store.address(), patience)
        except CheckpointError as error:
            if isinstance(command.origin, Fresh):  # of the job's own initial values there are no older ones
                raise ConfigError(field="job", problem=f"can't begin: {error}") from error
            stored = checkpoint_of(command.origin)
            if stored is None:  # memory of this run was read: nothing older is in its place, so it counts
                cause = replace(cause_of(error), kind="engine")
                return GroupBroken(at=0.0, generation=command.generation, worker="", cause=cause)
            return CheckpointRejected(
                at=0.0, stored=stored, problem=str(error), fallback=self._committer.before(stored)
            )
        for note in formed.notes:
            log.warning("%s", note)
        return GroupReady(
            at=0.0,
            generation=command.generation,
            step=formed.step,
            seconds=self._inbox.now() - began,
            transfer_s=formed.transfer_s,
            near_bytes=formed.near_bytes,
            far_bytes=formed.far_bytes,
            by_module=formed.by_module,
            parts=formed.parts,
            late=formed.late,
            computed=formed.computed,
        )

    def _participants(self) -> Participants:
        ready, logs = self.workers.ready(), self._spec.boundary_logs
        return Participants(
            peer_stores=self.peer_stores.handles(),
            handles=self.workers.handles(),
            nodes={name: one.node for name, one in ready.items()},
            addresses={name: one.address for name, one in ready.items()},
            progress_s=self._spec.timing.progress_s,
            replayers=logs.replayers if logs is not None else None,
        )

    def _ask_peers(self, command: AskPeers) -> None:
        """Ends in PeersReported, after the steps that they know of: nobody goes on from one that no journal
        has.
        """
        verdict_s = self._spec.timing.verdict_s

        def reported() -> Iterable[Event]:
            said = self.peer_stores.reported(verdict_s)
            return (
                *said.steps,
                PeersReported(at=0.0, generation=command.generation, snapshots=said.snapshots),
            )

        def nothing(cause: Cause) -> Event:
            log.warning("what peers hold is not known: %s", cause.detail)
            return PeersReported(at=0.0, generation=command.generation, snapshots=())

        name, within_s = f"asking the peers of generation {command.generation}", verdict_s + SLACK_S
        begin_events(
            self._effects, name, Lane.URGENT, within_s, reported, post=self._inbox.post, otherwise=nothing
        )

    def _abort(self, command: Abort) -> None:
        """Each worker's final report follows from itself, or WorkerLost; who says nothing has a deadline for
        it.
        """
        verdict_s, ready = self._spec.timing.verdict_s, self.workers.ready()
        there = {w: (self.workers.handle(w), ready[w]) for w in command.workers if w in ready}
        for worker in command.workers:
            if worker not in there:
                self._watch.lost(worker, Cause(kind="death", detail=f"{worker} is not there any more"))

        def reported() -> None:
            peer_stores = self.peer_stores.handles()
            abort(
                command.generation,
                there,
                roster=self._roster,
                peer_stores=peer_stores,
                lost=self._watch.lost,
                verdict_s=verdict_s,
            )

        name, within_s = f"aborting generation {command.generation}", verdict_s + WITNESS_S + SLACK_S
        begin_aside(self._effects, name, reported, within_s=within_s, lane=Lane.URGENT)
