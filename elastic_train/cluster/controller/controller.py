"""The controller actor: folds events through `control.transition`, journals, performs.

One thread decides. Everything else (workers, watches, effects) puts events into its inbox. Ray
restarts the actor when its process dies; it then begins a new term, folds the journal, and adopts the living
workers.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace

import ray

from elastic_train.cluster.controller.adopt_processes import find_peer_stores, find_workers
from elastic_train.cluster.controller.autoscaler_demand import ASK_AGAIN_S, Demand
from elastic_train.cluster.controller.chronicle import Chronicle
from elastic_train.cluster.controller.committer import Committer
from elastic_train.cluster.controller.driver_watch import DriverWatch
from elastic_train.cluster.controller.effect_endings import awaited
from elastic_train.cluster.controller.effects import Effects, Lane
from elastic_train.cluster.controller.end_run import finish
from elastic_train.cluster.controller.event_hooks import EventHook
from elastic_train.cluster.controller.hang_watch import HangWatch
from elastic_train.cluster.controller.inbox import Inbox
from elastic_train.cluster.controller.journal_writer import JournalWriter
from elastic_train.cluster.controller.liveness_watch import NodeWatch, WorkerWatch, at
from elastic_train.cluster.controller.node_roster import Roster
from elastic_train.cluster.controller.performer import Performer
from elastic_train.cluster.controller.ray_metrics import RayMetrics
from elastic_train.cluster.controller.request_watch import RequestWatch
from elastic_train.cluster.controller.room_watch import LOOK_S, RoomWatch
from elastic_train.cluster.controller.run_context import RunContext
from elastic_train.cluster.controller.silent_workers import SilentWorkers
from elastic_train.cluster.driver_process import DriverProcess
from elastic_train.cluster.messages import Heartbeat, Writing
from elastic_train.cluster.run_updates import Board, Driven, RunUpdate
from elastic_train.config import RunSpec
from elastic_train.control.adoption import resume_commands
from elastic_train.control.commands import Command, End
from elastic_train.control.events import (
    Adopted,
    ControllerFailed,
    Event,
    FencedOff,
    StopRequested,
    TermBegan,
    Tick,
    WorkerLost,
)
from elastic_train.control.fault_schedule import FaultSchedule
from elastic_train.control.journal_codec import changed
from elastic_train.control.plan_ahead import likely
from elastic_train.control.policy import Policy
from elastic_train.control.states import Ended, Outcome, State
from elastic_train.control.transition import transition
from elastic_train.errors import ElasticTrainError, Fenced
from elastic_train.observe.journal_records import record, wall_text
from elastic_train.planner.plan_cache import PlanCache
from elastic_train.planner.question import Planner
from elastic_train.recovery.evidence import Commitment, Stored
from elastic_train.storage.journal import Journal
from elastic_train.storage.outlast import outlast

log = logging.getLogger(__name__)
LAST_TRY_S = 60.0  # what a single operation of storage is tried for
FLUSH_S = 5.0  # how old an undecided event may get before it is durable
DURABLE_S = 10.0  # how long whoever asks for a stop waits until it is durable


class Controller:
    """One run's controller, on the machine of the `driver` that started it."""

    def __init__(
        self,
        *,
        run: str,
        spec: RunSpec,
        job: bytes,
        planner: Planner,
        environment: Mapping[str, str],
        driver: DriverProcess,
        faults: tuple[FaultSchedule, Mapping[str, str]] | None = None,
    ) -> None:
        self._context = RunContext(
            run=run, term=0, spec=spec, controller=None, environment=environment, job=job, faults=faults
        )
        self._spec, self._driver = spec, driver
        self._inbox = Inbox()
        # Records have the wall time of this moment and what has passed since, and none before the last one of
        # the term before: a clock that is set, or differs from another machine's, makes no duration negative.
        self._wall_origin = time.time() - self._inbox.now()  # noqa: TID251 - for people
        self._board = Board()
        self._driver_watch = DriverWatch(driver, spec.timing)
        self._hook = EventHook(spec.on_event, spec.name) if spec.on_event else None
        self._effects = Effects(fault=self._fault)
        self._roster = Roster()
        self._watch = WorkerWatch(spec, self._inbox.post, self._inbox.now)
        self._plans = PlanCache(planner=planner)
        self._policy = Policy.of(spec, self._plans)
        self._demand = Demand(run, spec)
        self._state = State()
        self._committer: Committer | None = None  # once the run is ours
        self._performer: Performer | None = None
        self._journal: JournalWriter | None = None
        self._found = False  # those that live on
        self._stops: dict[int, threading.Event] = {}  # requests that are not durable yet
        threading.Thread(target=self._live, name="controller", daemon=True).start()

    # -- called by workers

    def deliver(self, worker: str, words: Sequence[Event], heartbeat: Heartbeat) -> bool:
        """Take a worker's events and heartbeat. False: it was given up and has to end."""
        if not self._watch.heard(worker, heartbeat):
            return False
        self._inbox.hear(words)
        return True

    def deliver_kept(self, node: str, words: Sequence[Event], writing: Writing | None) -> bool:
        """The same of a node's peer store."""
        self._watch.wrote(node, writing)
        self._inbox.hear(words)
        return not self._found or self._performer is None or self._performer.peer_stores.knows(node)

    # -- called by drivers

    def updates(self, term: int, since: int, wait_s: float) -> RunUpdate:
        """This term's records from number `since` on, all of them for another term; waits for news."""
        self._driver_watch.heard()
        first = since if term == self._context.term else 0
        heartbeats = self._watch.heartbeats()
        return self._board.since(self._context.term, first, wait_s, heartbeats)

    def driven(self) -> Driven:
        silent_s = self._driver_watch.silent_s
        return Driven(driver=str(self._driver), silent_s=silent_s, ended=self._board.ended is not None)

    def stop(self, reason: str, *, patient: bool = False) -> None:
        """Returns once the request is durable: Ray asks again where this process ends before. So a first
        request is `patient`: heard twice it is still the first.
        """
        event = at(StopRequested(at=0.0, reason=reason, patient=patient), self._inbox.now())
        durable = self._stops[id(event)] = threading.Event()
        self._inbox.put(event)
        durable.wait(DURABLE_S)

    def pid(self) -> int:
        return os.getpid()

    # -- the loop

    def _live(self) -> None:
        try:
            if self._begin():
                self._loop()
        except Exception as error:  # noqa: BLE001 - said to the driver, never a silent hang
            self._give_up(error)
        self._driver_watch.wait_until_gone()  # it ends this actor; without one nobody else would
        ray.kill(ray.get_actor(*self._own_name()), no_restart=True)

    def _fault(self, name: str, error: Exception) -> None:
        """A fault of ours on another thread: it ends the run, and is journalled like any end."""
        log.error("%s failed", name, exc_info=error)
        self._inbox.post(ControllerFailed(at=0.0, detail="".join(traceback.format_exception(error))))

    def _give_up(self, error: Exception) -> None:
        """This thread decides no more. Wherever it was, the run ends with a reason, in the journal too."""
        log.error("the controller failed", exc_info=error)
        typed = error if isinstance(error, ElasticTrainError) else None
        detail = str(error) if typed is not None else "".join(traceback.format_exception(error))
        failed = at(ControllerFailed(at=0.0, detail=detail), self._inbox.now())
        fenced = isinstance(error, Fenced)
        if self._journal is not None and not fenced:
            try:
                self._decide(failed)
            except Exception as another:
                log.error("the end was not journalled", exc_info=another)
        self._finish(End(outcome="fenced" if fenced else "infrastructure", detail=detail), typed)

    def _begin(self) -> bool:
        """Own the run, fold its journal, adopt living workers. False if the run had only to be ended."""
        again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        state, (newest, kept) = awaited(
            self._effects,
            "taking over the run",
            Lane.STORAGE,
            self._spec.timing.storage_trouble_s + self._spec.timing.lease_s + LAST_TRY_S,
            lambda: outlast(self._take_over, self._spec.timing.storage_trouble_s, said=log.warning),
        )
        assert self._committer is not None
        self._wall_origin = max(self._wall_origin, self._chronicle.wall_s - self._inbox.now())
        self._performer = performer = Performer(
            self._context,
            inbox=self._inbox,
            watch=self._watch,
            committer=self._committer,
            effects=self._effects,
            roster=self._roster,
            ended=lambda end: self._finish(end, None),
        )
        self._hangs = HangWatch(
            self._spec.timing, post=self._inbox.post, stacks=performer.stacks, effects=self._effects
        )
        self._silence = SilentWorkers(
            self._watch, effects=self._effects, roster=self._roster, peer_stores=performer.peer_stores.handles
        )
        performer.prepare_store()
        self._state = state
        if again and isinstance(state.phase, Ended):  # it died between deciding the end and telling it
            for command in resume_commands(state, self._policy):
                performer.perform(command)
            return False
        run, timing = self._context.run, self._spec.timing
        find_peer_stores(run, performer, adopt=again)
        found = find_workers(run, performer, self._roster, timing=timing, adopt=again)
        performer.pairing.begin()
        self._found = True
        began = TermBegan(
            at=0.0,
            term=self._context.term,
            stored=newest,
            ever_stored=newest is not None,
            finished=newest is not None and newest.step >= self._spec.max_steps,
            again=again,
            kept=kept,
        )
        running = tuple((s.worker, s.node, s.generation, s.step) for s in found.living)
        adopted = Adopted(at=0.0, running=running, silent=found.silent)
        self._inbox.open((began, adopted, *found.steps))
        self._keep_watch()
        return True

    def _keep_watch(self) -> None:
        """Begin to look at what nobody reports, each at its own pace."""
        assert self._committer is not None
        inbox, timing = self._inbox, self._spec.timing
        nodes = NodeWatch(self._spec, self._roster, inbox.post, inbox.now, self._watch.nodes_heard)
        room = RoomWatch(self._spec, self._roster, self._performing.workers.coming, inbox.post)
        requests = RequestWatch(self._committer.store, self._context.term, inbox.post)
        self._effects.every("nodes", 0.5, nodes.poll)
        self._effects.every("deaths", 0.01, self._watch.look_for_deaths)
        self._effects.every("lease", timing.lease_s / 3, self._renew)
        self._effects.every("requests", timing.lease_s / 3, requests.look)
        self._effects.every("demand", ASK_AGAIN_S, self._demand.ask)
        self._effects.every("room", LOOK_S, room.look)

    def _take_over(self) -> tuple[State, tuple[Stored | None, tuple[Commitment, ...]]]:
        """Storage's part of the beginning: the state that led here, and the checkpoints there are."""
        holder = f"{self._driver}, controller {str(ray.get_runtime_context().get_actor_id())[:12]}"
        committer = Committer(self._spec, holder, self._inbox.post, self._effects)
        term = committer.take_over()
        self._context = replace(self._context, term=term, controller=ray.get_actor(*self._own_name()))
        self._committer = committer
        journal = Journal(committer.store, term, log=committer.log)
        metrics = RayMetrics(self._spec.name, self._spec.max_steps)
        chronicle = Chronicle(committer.store, journal, self._policy, tell=metrics.put)
        state = chronicle.begin()
        self._journal = JournalWriter(journal, self._effects, post=self._inbox.post, fenced=self._fenced)
        self._chronicle = chronicle
        return state, committer.newest()

    def _fenced(self, error: Fenced) -> None:
        self._inbox.post(FencedOff(at=0.0, by_term=error.by_term))

    def _own_name(self) -> tuple[str, str]:
        context = ray.get_runtime_context()
        return context.get_actor_name() or "", context.namespace

    def _loop(self) -> None:
        tick_s = self._policy.tick_s
        now = self._inbox.now
        next_tick, flushed, turn = now() + tick_s, now(), 0
        while True:  # at least once: the term's first event revives a run that ended before
            event = None if now() > next_tick + tick_s else self._inbox.next(next_tick)
            if event is None:  # nothing came, or so much that time would never pass
                event, next_tick = self._tick(next_tick), now() + tick_s
            commands = self._decide(event)
            if commands or id(event) in self._stops or now() - flushed > FLUSH_S:
                assert self._journal is not None, "the run was taken over"
                self._journal.flush()
                flushed = now()
            if (durable := self._stops.pop(id(event), None)) is not None:
                durable.set()
            for command in commands:
                self._performing.perform(command)
            if isinstance(self._state.phase, Ended):
                return
            if isinstance(event, Tick) and self._inbox.empty():
                turn += 1
                self._plan_ahead(turn)

    def _tick(self, due: float) -> Tick:
        """Time passes: look at what nobody reports."""
        now = self._inbox.now()
        heartbeats = self._watch.heartbeats()
        written_s = self._watch.written_s(self._state.facts.lineage.generation)
        moved_s = self._hangs.moved_s(self._state, heartbeats, written_s)
        event = Tick(at=now, late=max(0.0, now - due), moved_s=moved_s)
        if event.late > self._policy.late_ticks * self._policy.tick_s:
            self._watch.forgive()
            self._driver_watch.forgive(event.late)  # nor was it listened to
        self._silence.check()
        self._hangs.check(self._state, heartbeats)
        if (gone := self._driver_watch.check()) is not None:
            self._inbox.post(gone)
        return event

    def _decide(self, event: Event) -> tuple[Command, ...]:
        """The event's consequences: noted, and the state that follows kept. Returns what is to be done."""
        if isinstance(event, WorkerLost):
            self._performing.workers.lost(event.worker)
        outcome = transition(self._state, event, self._policy)
        if changed(self._state, outcome):
            self._note(event, outcome)
        self._state = outcome.state
        if self._committer is not None:
            self._committer.lineage = self._state.facts.lineage.chain
        return outcome.commands

    @property
    def _performing(self) -> Performer:
        assert self._performer is not None, "the run was taken over"
        return self._performer

    def _plan_ahead(self, turn: int) -> None:
        """While nothing happens: one plan that may be needed next."""
        question = likely(self._state, self._policy, self._inbox.now(), turn)
        if question is not None:
            self._plans.prepare(question)

    def _note(self, event: Event, outcome: Outcome) -> None:
        wall = wall_text(self._wall_origin + self._inbox.now())
        noted = self._board.put(lambda number: record(number, wall, event, outcome))
        self._chronicle.note(noted, outcome.state)
        if self._hook is not None:
            self._hook.hear(noted)

    def _finish(self, end: End, error: ElasticTrainError | None) -> None:
        """Put everything back, whatever ended the run, and tell how it ended. Once."""
        if self._board.ended is not None:
            return
        own = end.outcome != "fenced"  # what is in storage is another's by now
        try:
            if self._performer is not None:
                self._performer.wind_up(f"the run ended: {end.outcome}")
            finish(
                self._effects,
                peer_stores=self._performer.peer_stores.stop if self._performer is not None else None,
                journal=self._journal.last if self._journal is not None and own else None,
                lease=self._committer.release if self._committer is not None and own else None,
                demand=self._demand.release,
                hook=self._hook.close if self._hook is not None else None,
            )
        finally:  # the driver waits for this
            self._board.end(end, error)

    # -- keeping watch

    def _renew(self) -> None:
        assert self._committer is not None
        try:
            self._committer.renew()
        except Fenced as error:
            self._fenced(error)
