"""The controller actor: folds events through `control.transition`, journals, performs.

One thread decides. Everything else, workers' words, watches, effects, puts events into its inbox. Ray
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from elastic_train.cluster.controller import autoscaler_demand
from elastic_train.cluster.controller.adopt_processes import find_peer_stores, find_workers
from elastic_train.cluster.controller.committer import Committer
from elastic_train.cluster.controller.event_hooks import EventHook
from elastic_train.cluster.controller.hang_watch import HangWatch
from elastic_train.cluster.controller.peer_stores import PeerStores
from elastic_train.cluster.controller.performer import Performer
from elastic_train.cluster.controller.watch import NodeWatch, WorkerWatch, at
from elastic_train.cluster.messages import Heartbeat
from elastic_train.cluster.run_updates import Board, RunUpdate
from elastic_train.config import RunSpec
from elastic_train.control.adoption import resume_commands
from elastic_train.control.anticipated_questions import likely
from elastic_train.control.commands import End
from elastic_train.control.events import (
    Adopted,
    Event,
    FencedOff,
    SaveRequested,
    StopRequested,
    TermBegan,
    Tick,
    WorkerLost,
)
from elastic_train.control.faults import FaultSchedule
from elastic_train.control.journal_codec import changed, fold
from elastic_train.control.policy import Policy
from elastic_train.control.states import Ended, Outcome, State
from elastic_train.control.transition import transition
from elastic_train.errors import ElasticTrainError, Fenced, StorageError
from elastic_train.observe.records import from_json, record, to_json, wall_text
from elastic_train.planner.plan_cache import PlanCache
from elastic_train.planner.question import Planner
from elastic_train.storage.journal import Journal, read_journal
from elastic_train.storage.run_requests import saves_asked, stop_asked

log = logging.getLogger(__name__)
FLUSH_S = 5.0  # how old an undecided event may get before it is durable
FLUSH_WAIT_S = 2.0  # how long a decision waits for its journal: recovery never waits for storage
DRIVER_LEASES = 3  # lease times that the driver may be silent


@dataclass(frozen=True, slots=True, kw_only=True)
class Driven:
    """Who drives the run, and for how long it has said nothing."""

    driver: str
    silent_s: float
    ended: bool


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
        self._saves_heard = 0
        self._stop_heard = False  # the request to stop that lies in storage
        self._watch = WorkerWatch(spec, self._post, self._now)
        self._plans = PlanCache(planner=planner)
        self._policy = Policy.of(spec, self._plans)
        self._storage = ThreadPoolExecutor(max_workers=1, thread_name_prefix="storage")
        self._journal: Journal | None = None
        self._peer_stores: PeerStores | None = None  # once those that live on were found
        threading.Thread(target=self._live, name="controller", daemon=True).start()

    # -- called by workers

    def deliver(self, worker: str, words: Sequence[Event], heartbeat: Heartbeat) -> bool:
        """A worker's words and its heartbeat. False: it was given up and has to end."""
        if not self._watch.heard(worker, heartbeat):
            return False
        self._hear(words)
        return True

    def deliver_kept(self, node: str, words: Sequence[Event]) -> bool:
        """The same of a node's peer store."""
        self._hear(words)
        return self._peer_stores is None or self._peer_stores.knows(node)

    # -- called by drivers

    def updates(self, term: int, since: int, wait_s: float) -> RunUpdate:
        """This term's records from number `since` on, all of them for another term; waits for news."""
        self._driver_heard = time.monotonic()
        first = since if term == self._term else 0
        heartbeats = tuple(self._watch.heartbeats.values())
        return self._board.since(self._term, first, wait_s, heartbeats)

    def driven(self) -> Driven:
        return Driven(
            driver=self._driver, silent_s=self._driver_silent_s, ended=self._board.ended is not None
        )

    def stop(self, reason: str) -> None:
        self._post(StopRequested(at=0.0, reason=reason))

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
            state = self._begin()
            if state is not None:
                self._loop(state)
        except ElasticTrainError as error:
            self._finish(End(outcome="infrastructure", detail=str(error)), error)
        except Exception as error:  # noqa: BLE001 - a fault of ours: said to the driver, never a silent hang
            self._give_up(error)
        self._linger()

    def _linger(self) -> None:
        """Wait for the driver, which ends this actor; without one nobody else would."""
        pause = threading.Event()
        while self._driver_silent_s < DRIVER_LEASES * self._spec.timing.lease_s:
            pause.wait(1.0)
        ray.kill(ray.get_actor(*self._own_name()), no_restart=True)

    def _give_up(self, error: Exception) -> None:
        log.error("the controller failed", exc_info=error)
        detail = "".join(traceback.format_exception(error))
        self._performer.perform(End(outcome="infrastructure", detail=detail))

    def _begin(self) -> State | None:
        """Own the run, fold its journal, take over whoever is alive."""
        again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        holder = f"{self._driver}, controller {str(ray.get_runtime_context().get_actor_id())[:12]}"
        self._committer = Committer(self._spec, holder, self._post, self._storage)
        self._term = term = self._committer.take_over()
        handle = ray.get_actor(*self._own_name())
        self._performer = Performer(
            run=self._run,
            term=term,
            spec=self._spec,
            job=self._job,
            controller=handle,
            environment=self._environment,
            faults=self._faults,
            watch=self._watch,
            committer=self._committer,
            post=self._post,
            now=self._now,
            ended=lambda end: self._finish(end, None),
            fault=self._give_up,
        )
        self._hangs = HangWatch(
            self._spec.timing,
            post=self._post,
            stacks=self._performer.stacks,
            aside=self._performer.aside,
        )
        self._performer.prepare_store()
        old = [from_json(line).event for _, part in read_journal(self._committer.store) for line in part]
        state = fold(old, self._policy)
        self._journal = Journal(self._committer.store, term)
        if again and isinstance(state.phase, Ended):  # it died between deciding the end and telling it
            for command in resume_commands(state, self._policy):
                self._performer.perform(command)
            return None
        found = find_workers(self._run, self._performer, verdict_s=self._spec.timing.verdict_s, adopt=again)
        find_peer_stores(self._run, self._performer, adopt=again)
        self._peer_stores = self._performer.peer_stores
        newest = self._committer.newest()
        self._post(
            TermBegan(
                at=0.0,
                term=term,
                stored=newest,
                ever_stored=newest is not None,
                finished=newest is not None and newest.step >= self._spec.max_steps,
            )
        )
        running = tuple((s.worker, s.node, s.generation, s.step) for s in found.living)
        self._post(Adopted(at=0.0, running=running, silent=found.silent))
        with self._early_lock:
            for event in (*found.steps, *(self._early or ())):
                self._post(event)
            self._early = None
        self._nodes = NodeWatch(self._spec, self._post, self._now)
        threading.Thread(target=self._watch_nodes, name="nodes", daemon=True).start()
        threading.Thread(target=self._keep_lease, name="lease", daemon=True).start()
        threading.Thread(target=autoscaler_demand.ask, args=(self._spec,), name="demand", daemon=True).start()
        return state

    def _own_name(self) -> tuple[str, str]:
        context = ray.get_runtime_context()
        return context.get_actor_name() or "", context.namespace

    def _loop(self, state: State) -> None:
        tick_s = self._policy.tick_s
        next_tick, flushed, turn = self._now() + tick_s, self._now(), 0
        while True:  # at least once: the term's first event revives a run that ended before
            try:
                event = self._inbox.get(timeout=max(0.0, next_tick - self._now()))
            except queue.Empty:
                now = self._now()
                moved_s = self._hangs.moved_s(state, tuple(self._watch.heartbeats.values()))
                event = Tick(at=now, late=max(0.0, now - next_tick), moved_s=moved_s)
                if event.late > self._policy.late_ticks * tick_s:
                    self._watch.forgive()
                next_tick = now + tick_s
                self._watch.check_silence()
                self._hangs.check(state, tuple(self._watch.heartbeats.values()))
                self._check_driver()
            if isinstance(event, WorkerLost):
                self._performer.lost(event.worker)
            outcome = transition(state, event, self._policy)
            if changed(state, outcome):
                self._note(event, outcome)
            state = outcome.state
            self._committer.lineage = state.facts.lineage
            if outcome.commands or self._now() - flushed > FLUSH_S:
                self._flush()
                flushed = self._now()
            for command in outcome.commands:
                self._performer.perform(command)
            if isinstance(state.phase, Ended):
                return
            if isinstance(event, Tick) and self._inbox.empty():
                turn += 1
                self._plan_ahead(state, turn)

    def _plan_ahead(self, state: State, turn: int) -> None:
        """While nothing happens: one plan that may be needed next."""
        question = likely(state, self._policy, self._now(), turn)
        if question is not None:
            self._plans.prepare(question)

    def _note(self, event: Event, outcome: Outcome) -> None:
        assert self._journal is not None
        now = wall_text(time.time())  # noqa: TID251 - for people
        noted = self._board.put(lambda number: record(number, now, event, outcome))
        self._journal.append(to_json(noted))
        if self._hook is not None:
            self._hook.hear(noted)

    def _flush(self) -> None:
        assert self._journal is not None
        flushing = self._storage.submit(self._journal.flush)
        try:
            flushing.result(timeout=FLUSH_WAIT_S)
        except Late:
            log.warning("the journal is not durable yet: storage is slow")
        except StorageError as error:
            log.warning("the journal is not durable yet: %s", error)

    def _finish(self, end: End, error: ElasticTrainError | None) -> None:
        if self._journal is not None and end.outcome != "fenced":
            self._flush()
            self._committer.release()
            autoscaler_demand.release()
        if self._hook is not None:
            self._hook.close()
        self._board.end(end, error)

    # -- keeping watch

    def _watch_nodes(self) -> None:
        self._every(0.5, self._nodes.poll)

    def _keep_lease(self) -> None:
        def renew() -> None:
            try:
                self._committer.renew()
                reason = stop_asked(self._committer.store, self._term)
                if reason is not None and not self._stop_heard:
                    self._stop_heard = True
                    self.stop(reason)
                saves = saves_asked(self._committer.store, self._term)
                if saves > self._saves_heard:
                    self._saves_heard = saves
                    self._post(SaveRequested(at=0.0, reason="`elastic-train ckpt save`"))
            except Fenced as error:
                self._post(FencedOff(at=0.0, by_term=error.by_term))
            except StorageError as error:
                log.warning("the lease was not renewed: %s", error)

        self._every(self._spec.timing.lease_s / 3, renew)

    def _check_driver(self) -> None:
        silent = self._driver_silent_s
        if silent > DRIVER_LEASES * self._spec.timing.lease_s:
            reason = f"the driver has been silent for {silent:.0f} s"
            self._post(StopRequested(at=0.0, reason=reason, patient=True))
            self._driver_heard = time.monotonic()

    @property
    def _driver_silent_s(self) -> float:
        return time.monotonic() - self._driver_heard

    def _every(self, seconds: float, call: Callable[[], None]) -> None:
        pause = threading.Event()
        while self._board.ended is None:
            try:
                call()
            except RayError as error:
                log.warning("%s: %s", threading.current_thread().name, error)
            pause.wait(seconds)
