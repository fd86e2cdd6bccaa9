"""The controller actor: folds events through `control.transition`, journals, performs.

One thread decides. Everything else (workers, watches, effects) puts events into its inbox. Ray
restarts the actor when its process dies; it then begins a new term, folds the journal, and adopts the living
workers.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import traceback
from collections.abc import Mapping, Sequence

import ray

from elastic_train.cluster.controller.adopt_processes import find_peer_stores, find_workers
from elastic_train.cluster.controller.autoscaler_demand import ASK_AGAIN_S, Demand
from elastic_train.cluster.controller.chronicle import Chronicle
from elastic_train.cluster.controller.committer import Committer
from elastic_train.cluster.controller.effect_endings import awaited
from elastic_train.cluster.controller.effects import Effects, Lane
from elastic_train.cluster.controller.end_run import finish
from elastic_train.cluster.controller.event_hooks import EventHook
from elastic_train.cluster.controller.hang_watch import HangWatch
from elastic_train.cluster.controller.journal_writer import JournalWriter
from elastic_train.cluster.controller.liveness_watch import NodeWatch, WorkerWatch, at
from elastic_train.cluster.controller.node_roster import Roster
from elastic_train.cluster.controller.performer import Performer
from elastic_train.cluster.controller.ray_metrics import RayMetrics
from elastic_train.cluster.controller.request_watch import RequestWatch
from elastic_train.cluster.controller.silent_workers import SilentWorkers
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
from elastic_train.recovery.evidence import Stored
from elastic_train.storage.journal import Journal

log = logging.getLogger(__name__)
FLUSH_S = 5.0  # how old an undecided event may get before it is durable
DURABLE_S = 10.0  # how long whoever asks for a stop waits until it is durable
DRIVER_LEASES = 3  # lease times that the driver may be silent


class Controller:
    """One run's controller. `driver` is any text that tells people who started it."""

    def __init__(
        self,
        *,
        run: str,
        spec: RunSpec,
        job: bytes,
        planner: Planner,
        environment: Mapping[str, str],
        driver: str,
        faults: tuple[FaultSchedule, Mapping[str, str]] | None = None,
    ) -> None:
        self._run, self._spec, self._job = run, spec, job
        self._environment, self._driver = environment, driver
        self._faults = faults
        self._began = time.monotonic()
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._early: list[Event] | None = []  # words that came before this term began
        self._early_lock = threading.Lock()
        self._board = Board()
        self._term = 0
        self._driver_heard = time.monotonic()
        self._hook = EventHook(spec.on_event, spec.name) if spec.on_event else None
        self._effects = Effects(fault=self._fault)
        self._roster = Roster()
        self._watch = WorkerWatch(spec, self._post, self._now)
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
        self._hear(words)
        return True

    def deliver_kept(self, node: str, words: Sequence[Event], writing: Writing | None) -> bool:
        """The same of a node's peer store."""
        self._watch.wrote(node, writing)
        self._hear(words)
        return not self._found or self._performer is None or self._performer.peer_stores.knows(node)

    # -- called by drivers

    def updates(self, term: int, since: int, wait_s: float) -> RunUpdate:
        """This term's records from number `since` on, all of them for another term; waits for news."""
        self._driver_heard = time.monotonic()
        first = since if term == self._term else 0
        heartbeats = self._watch.heartbeats()
        return self._board.since(self._term, first, wait_s, heartbeats)

    def driven(self) -> Driven:
        return Driven(
            driver=self._driver, silent_s=self._driver_silent_s, ended=self._board.ended is not None
        )

    def stop(self, reason: str, *, patient: bool = False) -> None:
        """Returns once the request is durable: Ray asks again where this process ends before. So a first
        request is `patient`: heard twice it is still the first.
        """
        event = at(StopRequested(at=0.0, reason=reason, patient=patient), self._now())
        durable = self._stops[id(event)] = threading.Event()
        self._inbox.put(event)
        durable.wait(DURABLE_S)

    def pid(self) -> int:
        return os.getpid()

    # -- the loop

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _post(self, event: Event) -> None:
        self._inbox.put(at(event, self._now()))

    def _hear(self, words: Sequence[Event]) -> None:
        """Take words, or keep them while the term begins: newer steps must not overtake repeated ones."""
        with self._early_lock:
            if self._early is not None:
                self._early += words
                return
        for event in words:
            self._post(event)

    def _live(self) -> None:
        try:
            if self._begin():
                self._loop()
        except Exception as error:  # noqa: BLE001 - said to the driver, never a silent hang
            self._give_up(error)
        self._linger()

    def _linger(self) -> None:
        """Wait for the driver, which ends this actor; without one nobody else would."""
        pause = threading.Event()
        while self._driver_silent_s < DRIVER_LEASES * self._spec.timing.lease_s:
            pause.wait(1.0)
        ray.kill(ray.get_actor(*self._own_name()), no_restart=True)

    def _fault(self, name: str, error: Exception) -> None:
        """A fault of ours on another thread: it ends the run, and is journalled like any end."""
        log.error("%s failed", name, exc_info=error)
        self._post(ControllerFailed(at=0.0, detail="".join(traceback.format_exception(error))))

    def _give_up(self, error: Exception) -> None:
        """This thread decides no more. Wherever it was, the run ends with a reason, in the journal too."""
        log.error("the controller failed", exc_info=error)
        typed = error if isinstance(error, ElasticTrainError) else None
        detail = str(error) if typed is not None else "".join(traceback.format_exception(error))
        failed = at(ControllerFailed(at=0.0, detail=detail), self._now())
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
        state, newest = awaited(
            self._effects,
            "taking over the run",
            Lane.STORAGE,
            self._spec.timing.storage_trouble_s + self._spec.timing.lease_s,
            self._take_over,
        )
        assert self._committer is not None
        self._performer = performer = Performer(
            run=self._run,
            term=self._term,
            spec=self._spec,
            job=self._job,
            controller=ray.get_actor(*self._own_name()),
            environment=self._environment,
            faults=self._faults,
            watch=self._watch,
            committer=self._committer,
            effects=self._effects,
            roster=self._roster,
            post=self._post,
            now=self._now,
            ended=lambda end: self._finish(end, None),
        )
        self._hangs = HangWatch(
            self._spec.timing, post=self._post, stacks=performer.stacks, effects=self._effects
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
        find_peer_stores(self._run, performer, adopt=again)
        found = find_workers(self._run, performer, self._roster, timing=self._spec.timing, adopt=again)
        performer.pair()
        self._found = True
        self._post(
            TermBegan(
                at=0.0,
                term=self._term,
                stored=newest,
                ever_stored=newest is not None,
                finished=newest is not None and newest.step >= self._spec.max_steps,
                again=again,
            )
        )
        running = tuple((s.worker, s.node, s.generation, s.step) for s in found.living)
        self._post(Adopted(at=0.0, running=running, silent=found.silent))
        with self._early_lock:
            for event in (*found.steps, *(self._early or ())):
                self._post(event)
            self._early = None
        nodes = NodeWatch(self._spec, self._roster, self._post, self._now, self._watch.nodes_heard)
        timing = self._spec.timing
        self._effects.every("nodes", 0.5, nodes.poll)
        self._effects.every("deaths", 0.01, self._watch.look_for_deaths)
        self._effects.every("lease", timing.lease_s / 3, self._renew)
        requests = RequestWatch(self._committer.store, self._term, self._post)
        self._effects.every("requests", timing.lease_s / 3, requests.look)
        self._effects.every("demand", ASK_AGAIN_S, self._demand.ask)
        return True

    def _take_over(self) -> tuple[State, Stored | None]:
        """Storage's part of the beginning: the state that led here, and the newest checkpoint."""
        holder = f"{self._driver}, controller {str(ray.get_runtime_context().get_actor_id())[:12]}"
        committer = Committer(self._spec, holder, self._post, self._effects)
        self._term = committer.take_over()
        self._committer = committer
        journal = Journal(committer.store, self._term, log=committer.log)
        metrics = RayMetrics(self._spec.name, self._spec.max_steps)
        chronicle = Chronicle(committer.store, journal, self._policy, tell=metrics.put)
        state = chronicle.begin()
        self._journal, self._chronicle = JournalWriter(journal, self._effects, fenced=self._fenced), chronicle
        return state, committer.newest()

    def _fenced(self, error: Fenced) -> None:
        self._post(FencedOff(at=0.0, by_term=error.by_term))

    def _own_name(self) -> tuple[str, str]:
        context = ray.get_runtime_context()
        return context.get_actor_name() or "", context.namespace

    def _loop(self) -> None:
        tick_s = self._policy.tick_s
        next_tick, flushed, turn = self._now() + tick_s, self._now(), 0
        while True:  # at least once: the term's first event revives a run that ended before
            event = None if self._now() > next_tick + tick_s else self._next(next_tick)
            if event is None:  # nothing came, or so much that time would never pass
                event, next_tick = self._tick(next_tick), self._now() + tick_s
            commands = self._decide(event)
            if commands or id(event) in self._stops or self._now() - flushed > FLUSH_S:
                assert self._journal is not None, "the run was taken over"
                self._journal.flush()
                flushed = self._now()
            if (durable := self._stops.pop(id(event), None)) is not None:
                durable.set()
            for command in commands:
                self._performing.perform(command)
            if isinstance(self._state.phase, Ended):
                return
            if isinstance(event, Tick) and self._inbox.empty():
                turn += 1
                self._plan_ahead(turn)

    def _next(self, until: float) -> Event | None:
        """The next word, if one comes in time."""
        try:
            return self._inbox.get(timeout=max(0.0, until - self._now()))
        except queue.Empty:
            return None

    def _tick(self, due: float) -> Tick:
        """Time passes: look at what nobody reports."""
        now = self._now()
        heartbeats = self._watch.heartbeats()
        written_s = self._watch.written_s(self._state.facts.lineage.generation)
        moved_s = self._hangs.moved_s(self._state, heartbeats, written_s)
        event = Tick(at=now, late=max(0.0, now - due), moved_s=moved_s)
        if event.late > self._policy.late_ticks * self._policy.tick_s:
            self._watch.forgive()
            self._driver_heard += event.late  # nor was it listened to
        self._silence.check()
        self._hangs.check(self._state, heartbeats)
        self._check_driver()
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
        question = likely(self._state, self._policy, self._now(), turn)
        if question is not None:
            self._plans.prepare(question)

    def _note(self, event: Event, outcome: Outcome) -> None:
        now = wall_text(time.time())  # noqa: TID251 - for people
        noted = self._board.put(lambda number: record(number, now, event, outcome))
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

    def _check_driver(self) -> None:
        if (silent := self._driver_silent_s) > DRIVER_LEASES * self._spec.timing.lease_s:
            reason = f"the driver has been silent for {silent:.0f} s"
            self._post(StopRequested(at=0.0, reason=reason, patient=True))
            self._driver_heard = time.monotonic()

    @property
    def _driver_silent_s(self) -> float:
        return time.monotonic() - self._driver_heard
