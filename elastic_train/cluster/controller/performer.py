"""Performs commands. What takes time runs on a thread of its own; its end is posted as an event."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, assert_never

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_train.cluster import ray_private
from elastic_train.cluster.actor_names import NAMESPACE, worker_name
from elastic_train.cluster.controller.committer import Committer
from elastic_train.cluster.controller.form_group import Participants, form
from elastic_train.cluster.controller.peer_stores import PeerStores
from elastic_train.cluster.controller.watch import WorkerWatch, accepts, node_info
from elastic_train.cluster.error_causes import cause_of
from elastic_train.cluster.messages import Ready
from elastic_train.cluster.ray_calls import answer, remote
from elastic_train.cluster.rendezvous_actor import Rendezvous
from elastic_train.cluster.worker.worker_actor import THREADS, WorkerActor
from elastic_train.config import RunSpec
from elastic_train.control.commands import (
    Abort,
    AskPeers,
    Command,
    Commit,
    End,
    Forget,
    Form,
    Go,
    Pause,
    Prune,
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
    PeersReported,
    WorkerReady,
)
from elastic_train.control.faults import FaultSchedule
from elastic_train.errors import CheckpointError, ConfigError, ElasticTrainError, UserCodeError
from elastic_train.recovery.evidence import checkpoint_of

log = logging.getLogger(__name__)

OF_WORKERS = {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}
"""For what replays send each other. It makes Ray load torch, which no other process of a run needs."""


class Performer:
    """Knows the handles of the run's workers and does to them what it is told."""

    def __init__(
        self,
        *,
        run: str,
        term: int,
        spec: RunSpec,
        job: bytes,
        controller: Any,
        environment: Mapping[str, str],
        faults: tuple[FaultSchedule, Mapping[str, str]] | None,
        watch: WorkerWatch,
        committer: Committer,
        post: Callable[[Event], None],
        now: Callable[[], float],
        ended: Callable[[End], None],
        fault: Callable[[Exception], None],
    ) -> None:
        self._run, self._term, self._spec, self._job = run, term, spec, job
        self._controller, self._environment = controller, dict(environment)
        self._faults = faults
        self._watch, self._committer = watch, committer
        self._post, self._now, self._ended, self._fault = post, now, ended, fault
        self._handles: dict[str, Any] = {}
        self._ready: dict[str, Ready] = {}
        self._groups: dict[int, tuple[str, ...]] = {}  # members by generation
        self._rendezvous: Any = None
        self._over = False  # what was still being started is stopped, too
        self.peer_stores = PeerStores(
            run=run, term=term, spec=spec, controller=controller, environment=environment
        )
        self._store_lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max_workers=64, thread_name_prefix="perform")

    def perform(self, command: Command) -> None:
        """Start the effect and return; nothing here waits for it."""
        match command:
            case StartWorker():
                self.aside(self._start_worker, command)
            case StopWorker(worker=worker, reason=reason):
                self.stop_worker(worker, reason)
            case Abort():
                for worker in command.workers:
                    self.aside(self._abort, command.generation, worker)
            case Pause(generation=generation, save=save):
                self._ask(generation, pause=True, save=save)
            case Save(generation=generation):
                self._ask(generation, save=True)
            case Form():
                self._groups[command.generation] = command.plan.workers
                self.aside(self._form, command)
            case Go(generation=generation):
                self.aside(self.pair)
                for worker in self._groups.get(generation, ()):
                    if worker in self._handles:
                        ready = self._ready.get(worker)
                        peer_store = self.peer_stores.of(ready.node) if ready is not None else None
                        self._handles[worker].go.remote(generation, peer_store)
            case Commit():
                self._committer.commit(command)
            case Prune():
                self._committer.prune(command)
            case Forget(generation=generation, step=step):
                for worker in self._groups.get(generation, ()):
                    if worker in self._handles:
                        self._handles[worker].forget.remote(generation, step)
            case AskPeers():
                self.aside(self._ask_peers, command.generation)
            case End():
                self._over = True
                for worker in list(self._handles):
                    self.stop_worker(worker, f"the run ended: {command.outcome}")
                self.peer_stores.stop()
                if self._rendezvous is not None:
                    ray.kill(self._rendezvous)
                self._ended(command)
            case _:
                assert_never(command)

    def aside(self, effect: Callable[..., object], *arguments: Any) -> None:
        """Run an effect on its own thread. What it doesn't expect is a fault of ours, never lost."""

        def run() -> None:
            try:
                effect(*arguments)
            except Exception as error:  # noqa: BLE001 - said to the driver instead of a silent hang
                self._fault(error)

        self._threads.submit(run)

    # -- workers

    def adopt(self, worker: str, handle: Any, ready: Ready, generation: int) -> None:
        """Take over a worker that an earlier incarnation of this controller started."""
        self._handles[worker], self._ready[worker] = handle, ready
        self._groups[generation] = (*self._groups.get(generation, ()), worker)
        self._watch.add(worker, handle)

    def meet(self, worker: str, handle: Any) -> None:
        """Know the process of a worker that said nothing yet, so that it can be waited for or ended."""
        self._handles[worker] = handle

    def lost(self, worker: str) -> None:
        """Forget a worker that is gone, and make sure that it is."""
        handle = self._handles.pop(worker, None)
        self._ready.pop(worker, None)
        if handle is not None:
            with suppress(RayError):
                ray.kill(handle, no_restart=True)
            self.aside(self.pair)

    def stop_worker(self, worker: str, reason: str) -> None:
        log.info("stop %s: %s", worker, reason)
        self._watch.expect_end(worker)
        self.lost(worker)

    def _start_worker(self, command: StartWorker) -> None:
        spec, name = self._spec, command.worker
        info = node_info(command.node)
        if info is None:
            detail = f"node {command.node} left before {name} was started"
            self._watch.lost(name, Cause(kind="death", detail=detail, phase="starting"))
            return
        self.peer_stores.start(command.node)
        handle = self._handles.get(name)
        if handle is None:  # else an earlier incarnation of this controller started it
            handle = self._handles[name] = self._process(command, info["NodeID"])
        self._watch.add(name, handle)
        if self._over:
            self.stop_worker(name, "the run ended")
            return
        try:
            ready: Ready = answer(handle.ready.remote(), spec.timing.start_worker_s)
        except (ConfigError, UserCodeError) as error:
            self._watch.lost(name, cause_of(error, node=command.node))
        except GetTimeoutError:
            detail = f"{name} was not up {spec.timing.start_worker_s:.0f} s after its start"
            self._watch.lost(name, Cause(kind="silence", detail=detail, phase="starting"))
        except RayError as error:
            self._watch.lost(name, Cause(kind="death", detail=f"{name}: {error}"[:300], phase="starting"))
        else:
            self._ready[name] = ready
            self.aside(self.pair)
            self._post(WorkerReady(at=0.0, worker=name, node=command.node, pid=ready.pid))

    def _process(self, command: StartWorker, node_id: str) -> Any:
        """A new worker's actor."""
        spec, name = self._spec, command.worker
        return (
            remote(WorkerActor, concurrency_groups=THREADS)
            .options(
                name=worker_name(self._run, self._term, name),
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=spec.cpus_per_worker,
                num_gpus=spec.gpus_per_worker,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
                runtime_env=self._environment_of_workers(),
            )
            .remote(
                name=name,
                node=command.node,
                spec=spec,
                job=self._job,
                controller=self._controller,
                device="cuda" if spec.gpus_per_worker else "cpu",
                faults=self._faults,
            )
        )

    def _environment_of_workers(self) -> dict[str, Any]:
        """Ours, and over it a person's own."""
        own = dict(self._spec.worker_environment)
        return own | {"env_vars": self._environment | own.get("env_vars", {}) | OF_WORKERS}

    # -- groups

    def pair(self) -> None:
        """Who holds whose copies: nodes whose workers all stand by are free for it."""
        group = self._groups.get(max(self._groups, default=0), ())
        ready = dict(self._ready)
        seated = {ready[worker].node for worker in group if worker in ready}
        self.peer_stores.pair({one.node for one in ready.values()} - seated)

    def _form(self, command: Form) -> None:
        began = self._now()
        self.aside(self.peer_stores.ensure, command.plan.nodes)
        participants = Participants(
            peer_stores=self.peer_stores.handles(),
            handles=dict(self._handles),
            nodes={name: ready.node for name, ready in self._ready.items()},
            addresses={name: ready.address for name, ready in self._ready.items()},
            progress_s=self._spec.timing.progress_s,
            replayers=self._spec.boundary_logs.replayers if self._spec.boundary_logs is not None else None,
        )
        try:
            formed = form(command, participants, self._store(), deadline_s=self._spec.timing.form_s)
        except CheckpointError as error:
            stored = checkpoint_of(command.origin)
            assert stored is not None
            self._post(
                CheckpointRejected(
                    at=0.0, stored=stored, problem=str(error), fallback=self._committer.before(stored)
                )
            )
        except (ElasticTrainError, RayError) as error:
            cause = cause_of(error, phase="forming")
            self._post(GroupBroken(at=0.0, generation=command.generation, worker="", cause=cause))
        else:
            for note in formed.notes:
                log.warning("%s", note)
            seconds = self._now() - began
            self._post(
                GroupReady(
                    at=0.0,
                    generation=command.generation,
                    step=formed.step,
                    seconds=seconds,
                    transfer_s=formed.transfer_s,
                    near_bytes=formed.near_bytes,
                    far_bytes=formed.far_bytes,
                )
            )

    def _ask_peers(self, generation: int) -> None:
        reported = self.peer_stores.reported(self._spec.timing.verdict_s)
        for report in reported.steps:  # first: nobody goes on from a step that is not in the journal
            self._post(report)
        self._post(PeersReported(at=0.0, generation=generation, snapshots=reported.snapshots))

    def _store(self) -> tuple[str, int]:
        """The rendezvous store's address; a new store where the old one is gone."""
        with self._store_lock:
            return self._find_store()

    def _find_store(self) -> tuple[str, int]:
        if self._rendezvous is not None:
            with suppress(RayError, GetTimeoutError):
                return answer(self._rendezvous.address.remote(), 5.0)
        self._rendezvous = (
            remote(Rendezvous)
            .options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(ray_private.this_node(), soft=False),
                runtime_env={"env_vars": self._environment},
            )
            .remote()
        )
        return answer(self._rendezvous.address.remote(), self._spec.timing.form_s)

    def prepare_store(self) -> None:
        """Start the rendezvous store ahead of the first group."""
        self.aside(self._prepare_store)

    def _prepare_store(self) -> None:
        with suppress(RayError, GetTimeoutError):  # the group that needs it starts one itself
            self._store()

    def _abort(self, generation: int, worker: str) -> None:
        handle, ready = self._handles.get(worker), self._ready.get(worker)
        if handle is None or ready is None:
            self._watch.lost(worker, Cause(kind="death", detail=f"{worker} is not there any more"))
            return
        if not self._raylet_accepts(ready.node):
            detail = f"{worker}: its node {ready.node} refuses connections"
            self._watch.lost(worker, Cause(kind="death", detail=detail))
            return
        try:
            answer(handle.abort.remote(generation), self._spec.timing.verdict_s)
        except GetTimeoutError:
            detail = f"{worker} did not answer within {self._spec.timing.verdict_s:.0f} s of an abort"
            self._watch.lost(worker, Cause(kind="silence", detail=detail))
        except RayError as error:
            self._watch.lost(worker, Cause(kind="death", detail=f"{worker}: {type(error).__name__}"))

    def stacks(self, workers: Sequence[str]) -> dict[str, str]:
        """The stack of each worker's training thread. Those that don't answer in time are left out."""
        calls = {w: self._handles[w].stack.remote() for w in workers if w in self._handles}
        ray.wait(list(calls.values()), num_returns=max(len(calls), 1), timeout=self._spec.timing.verdict_s)
        found: dict[str, str] = {}
        for worker, call in calls.items():
            with suppress(RayError, GetTimeoutError):
                found[worker] = answer(call, 0.01)
        return found

    def _raylet_accepts(self, node: str) -> bool:
        info = node_info(node)
        return info is not None and accepts(info["NodeManagerAddress"], info["NodeManagerPort"])

    def _ask(self, generation: int, *, pause: bool = False, save: bool = False) -> None:
        for worker in self._groups.get(generation, ()):
            if worker in self._handles:
                self._handles[worker].request.remote(generation, pause=pause, save=save)
