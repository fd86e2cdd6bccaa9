"""Start, name and end the worker processes of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_train.cluster.actor_names import NAMESPACE, worker_name
from elastic_train.cluster.controller.effect_endings import why_not
from elastic_train.cluster.controller.effects import Done, Effect, Effects, Ending, Failed, Lane, Late
from elastic_train.cluster.controller.liveness_watch import WorkerWatch
from elastic_train.cluster.controller.node_roster import Roster
from elastic_train.cluster.controller.run_context import RunContext
from elastic_train.cluster.messages import Ready
from elastic_train.cluster.ray_calls import remote
from elastic_train.cluster.worker.worker_actor import THREADS, WorkerActor
from elastic_train.control.commands import StartWorker
from elastic_train.control.events import Cause, Event, WorkerReady

log = logging.getLogger(__name__)

OF_WORKERS = {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}
"""For what replays send each other. It makes Ray load torch, which no other process of a run needs."""


class WorkerProcesses:
    """Safe from several threads. `beside` is called where a worker's node gets its first worker, `changed`
    where one came up or is gone.
    """

    def __init__(
        self,
        context: RunContext,
        *,
        effects: Effects,
        roster: Roster,
        watch: WorkerWatch,
        post: Callable[[Event], None],
        beside: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        self._context, self._spec = context, context.spec
        self._effects, self._roster, self._watch, self._post = effects, roster, watch, post
        self._beside, self._changed = beside, changed
        self._handles: dict[str, Any] = {}
        self._ready: dict[str, Ready] = {}
        self._nodes: dict[str, str] = {}  # of those that were started here
        self._over = False  # what was still being started is stopped, too

    def handle(self, worker: str) -> Any:
        """A worker's actor, or None."""
        return self._handles.get(worker)

    def handles(self) -> dict[str, Any]:
        return dict(self._handles)

    def ready(self) -> dict[str, Ready]:
        """Who is up."""
        return dict(self._ready)

    def coming(self) -> dict[str, tuple[str, Any]]:
        """Who is not up yet: the node and the actor."""
        return {
            name: (self._nodes[name], handle)
            for name, handle in self.handles().items()
            if name not in self._ready and name in self._nodes
        }

    def adopt(self, worker: str, handle: Any, ready: Ready) -> None:
        """Take over a worker that an earlier incarnation of this controller started."""
        self._handles[worker], self._ready[worker] = handle, ready
        self._watch.add(worker, handle)
        self._watch.met(ready)

    def meet(self, worker: str, handle: Any) -> None:
        """Know the process of a worker that said nothing yet, so that it can be waited for or ended."""
        self._handles[worker] = handle

    def start(self, command: StartWorker) -> None:
        """Ends in WorkerReady or WorkerLost."""
        name = command.worker
        self._nodes[name] = command.node

        def created(ending: Ending[Any]) -> None:
            if not isinstance(ending, Done):
                self._not_up(command, ending)
            elif ending.value is None:
                detail = f"node {command.node} left before {name} was started"
                self._watch.lost(name, Cause(kind="death", detail=detail, phase="starting"))
            else:
                self._await(command, ending.value)

        effect = Effect(
            name=f"starting {name}",
            lane=Lane.STARTING,
            within_s=self._spec.timing.start_worker_s,
            call=lambda: self._created(command),
            ended=created,
        )
        self._effects.begin(effect)

    def stop(self, worker: str, reason: str) -> None:
        log.info("stop %s: %s", worker, reason)
        self._watch.expect_end(worker)
        self.lost(worker)

    def stop_all(self, reason: str) -> None:
        """End them all, and those that are still to come."""
        self._over = True
        for worker in self.handles():
            self.stop(worker, reason)

    def lost(self, worker: str) -> None:
        """Forget a worker that is gone, and make sure that it is."""
        handle = self._handles.pop(worker, None)
        self._ready.pop(worker, None)
        self._nodes.pop(worker, None)
        if handle is not None:
            with suppress(RayError):
                ray.kill(handle, no_restart=True)
            self._changed()

    # -- private

    def _await(self, command: StartWorker, handle: Any) -> None:
        name = command.worker
        self._watch.add(name, handle)
        if self._over:
            self.stop(name, "the run ended")
            return

        def up(ending: Ending[Ready]) -> None:
            if not isinstance(ending, Done):
                self._not_up(command, ending)
                return
            self._ready[name] = ending.value
            self._watch.met(ending.value)
            self._changed()
            self._post(WorkerReady(at=0.0, worker=name, node=command.node, pid=ending.value.pid))

        coming = handle.ready.remote().future()
        self._effects.follow(f"the start of {name}", coming, self._spec.timing.start_worker_s, up)

    def _not_up(self, command: StartWorker, ending: Any) -> None:
        name = command.worker
        match ending:
            case Failed(account="machines" | "ours", error=error):
                cause = Cause(kind="death", detail=f"{name}: {error}"[:300], phase="starting")
            case Late(within_s=within_s):
                detail = f"{name} was not up {within_s:.0f} s after its start"
                cause = Cause(kind="silence", detail=detail, phase="starting")
            case _:
                cause = why_not(f"the start of {name}", ending, phase="starting", node=command.node)
        self._watch.lost(name, cause)

    def _created(self, command: StartWorker) -> Any:
        """The actor of a worker, which may not be up yet; None where its node is gone."""
        info = self._roster.of(command.node)
        if info is None:
            return None
        self._beside(command.node)
        handle = self._handles.get(command.worker)
        if handle is None:  # else an earlier incarnation of this controller started it
            handle = self._handles[command.worker] = self._process(command, info["NodeID"])
        return handle

    def _process(self, command: StartWorker, node_id: str) -> Any:
        """A new worker's actor."""
        context, spec, name = self._context, self._spec, command.worker
        return (
            remote(WorkerActor, concurrency_groups=THREADS)
            .options(
                name=worker_name(context.run, context.term, name),
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
                job=context.job,
                controller=context.controller,
                faults=context.faults,
            )
        )

    def _environment_of_workers(self) -> dict[str, Any]:
        """Ours, and over it a person's own."""
        own = dict(self._spec.worker_environment)
        return own | {"env_vars": dict(self._context.environment) | own.get("env_vars", {}) | OF_WORKERS}
