"""Launch a run from the driver: preflight, start of the controller, display, result."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorAlreadyExistsError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_train.checkpoint.begin import begin
from elastic_train.cluster import ray_private
from elastic_train.cluster.actor_names import NAMESPACE, controller_name, run_key
from elastic_train.cluster.controller.controller import Controller
from elastic_train.cluster.driver.callbacks import Callbacks
from elastic_train.cluster.driver.cluster_preflight import hosts, problems_of
from elastic_train.cluster.driver.follow_run import follow, signals_restored
from elastic_train.cluster.driver.head_watch import RAY_ENDS_S, HeadWatch
from elastic_train.cluster.driver.live_page import live_page
from elastic_train.cluster.driver.result import Result
from elastic_train.cluster.driver.run_planner import make_planner, shape_of
from elastic_train.cluster.driver.takeover import take_over
from elastic_train.cluster.driver_process import DriverProcess
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.cluster.label_selectors import selected
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.cluster.pickle_job import sent
from elastic_train.cluster.ray_calls import connect, host_and_port, remote
from elastic_train.config import Prints, ResumeFrom, RunSpec
from elastic_train.errors import ConfigError, HeadLost
from elastic_train.planner.plan import counted
from elastic_train.planner.question import Planner
from elastic_train.storage.fsspec_store import child_url, open_store
from elastic_train.storage.outlast import outlast
from elastic_train.storage.preflight import Token, probe
from elastic_train.storage.urls import parse
from elastic_train.train.task import Task

PROCESS_ENVIRONMENT: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",  # workers share the node's cores; a person's own value wins
    # NCCL's watchdog must neither abort nor end the process: the controller breaks groups itself.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
LOCAL_CLUSTER: Mapping[str, str] = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
PAGE_TOKEN = "ELASTIC_TRAIN_UI_TOKEN"
T = TypeVar("T")
RAY_RECONNECTS = "RAY_gcs_rpc_server_reconnect_timeout_s"
JOB_STOP_WAIT_S = 3.0  # Ray's default
RAY_COPIES = "working_dir_files"  # where Ray keeps copies of the working directories of jobs


def fit(
    task: Task,
    spec: RunSpec,
    *,
    address: str | None,
    local_nodes: int,
    quiet: bool,
    verbose: bool = False,
    prints: Prints = "none",
    page: str | int | None = None,
    chaos: Chaos | None = None,
    resume_from: ResumeFrom | None = None,
    callbacks: Sequence[Any] = (),
) -> Result:
    """See `ElasticTrainer.fit`. `chaos` performs its faults on the way."""
    if chaos is None and not ray.is_initialized() and joined(address) is None:
        check_local(spec, local_nodes)
    job = sent(task)  # before the model is built: what building leaves behind in the task is not the job
    spec = replace(spec, storage_path=absolute(spec.storage_path))
    store = open_store(child_url(spec.storage_path, spec.name))
    reported = Callbacks(callbacks, spec)
    lasting = Lasting(spec.timing.storage_trouble_s, quiet=quiet)
    token = lasting.do(lambda: probe(store))  # before anything is started
    shape = shape_of(task, spec)
    with live_page(spec, page, os.environ.get(PAGE_TOKEN)) as served:
        if served is not None:
            _say(f"page {served[1].url}", quiet=quiet)
        with signals_restored(), _cluster(address, local_nodes, cpus=_cpus(spec), quiet=quiet):
            try:
                lasting.do(lambda: _check_nodes(spec, token))
            finally:
                lasting.do(lambda: store.delete([token.path]))
            if resume_from is not None:
                given = replace(resume_from, url=absolute(resume_from.url))
                lasting.do(lambda: begin(store, given, holder=str(DriverProcess.here())))
            ray_private.leave_deaths_to_the_run()
            controller = _start(spec, job, make_planner(task, spec, shape, ray.nodes()), chaos)
            return follow(
                controller,
                spec,
                quiet=quiet,
                verbose=verbose,
                prints=prints,
                grace_s=_grace_s(),
                head=HeadWatch(str(ray.get_runtime_context().gcs_address), ray_ends_s=_ray_ends_s()),
                chaos=chaos,
                callbacks=reported,
                live=None if served is None else served[0],
            )


@dataclass(frozen=True, slots=True)
class Lasting:
    """Does what needs storage before there is a run: trouble of it is waited for as later on, and told."""

    within_s: float
    quiet: bool

    def do(self, call: Callable[[], T]) -> T:
        return outlast(call, self.within_s, said=self._say)

    def _say(self, text: str) -> None:
        _say(f"the run has not begun: {text}", quiet=self.quiet)


def _say(text: str, *, quiet: bool) -> None:
    if not quiet:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def prepare_local_environment() -> None:
    """Set what the processes of a local cluster inherit. Call before `LocalCluster`."""
    for name, value in {**PROCESS_ENVIRONMENT, **LOCAL_CLUSTER}.items():
        os.environ.setdefault(name, value)
    if not ray_private.address_can_be_noted():  # another user's: of no use to this cluster, and in its way
        os.environ.setdefault("RAY_TMPDIR", f"/tmp/ray-{os.getuid()}")


def process_environment() -> dict[str, str]:
    """What every process of a run is started with; a person's own settings win."""
    return {name: os.environ.get(name, value) for name, value in PROCESS_ENVIRONMENT.items()}


def joined(address: str | None) -> str | None:
    """The cluster to join, as said or as in a submitted job by the environment; None where there is none."""
    field = "address" if address else "RAY_ADDRESS"
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address.startswith("ray://"):
        raise ConfigError(
            field=field,
            problem=f"{address} is for Ray's client, and a driver has to be on a machine of the cluster.",
            remedy="Submit the job: `ray job submit --working-dir . -- python JOB.py`.",
        )
    return None if address == "local" else address


@contextlib.contextmanager
def _cluster(address: str | None, local_nodes: int, *, cpus: int, quiet: bool) -> Iterator[None]:
    """The cluster that this process is connected to, else the one to join, else a local one."""
    if ray.is_initialized():
        _check_connected(address)
        yield
        return
    to_join = joined(address)
    if to_join is not None:
        connect(to_join, namespace=NAMESPACE)
        try:
            yield
        except HeadLost:  # there is nobody left to take leave of, and Ray would wait for it
            raise
        except BaseException:
            ray.shutdown()
            raise
        ray.shutdown()
    else:
        prepare_local_environment()
        _say(
            f"starting a Ray cluster on this machine: a head and {counted(local_nodes, 'node')}", quiet=quiet
        )
        with LocalCluster(local_nodes, cpus=cpus):
            yield


def _cpus(spec: RunSpec) -> int:
    """Of a local node: those of one worker."""
    return max(1, math.ceil(spec.cpus_per_worker))


def check_local(spec: RunSpec, local_nodes: int) -> None:
    """Refuse what a local cluster never has: its nodes are all there from the start."""
    if not selected({}, spec.labels):
        raise ConfigError(
            field="scaling_config.label_selector",
            problem="nodes of a local cluster have no labels.",
            remedy="Join a cluster by address or RAY_ADDRESS, or leave the selector out.",
        )
    if spec.min_workers > local_nodes:
        raise ConfigError(
            field="fit(local_nodes=...)",
            problem=f"a local cluster of {local_nodes} nodes has a worker on each, and num_workers asks for "
            f"{spec.min_workers} at least.",
            remedy="Raise local_nodes, lower the minimum, or join a cluster by address or RAY_ADDRESS.",
        )


def _check_connected(address: str | None) -> None:
    """Refuse an address that a person gives and that this process is not connected to."""
    connected = str(ray.get_runtime_context().gcs_address)
    if address not in (None, "", "auto") and _resolved(str(address)) != _resolved(connected):
        raise ConfigError(
            field="address",
            problem=f"it says {address}, and this process is connected to {connected}.",
            remedy="Leave it out, or call ray.shutdown() before.",
        )


def _resolved(address: str) -> tuple[str, int]:
    """Host and port, the host as a number where it has one."""
    host, port = host_and_port(address)
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]), port
    except OSError:
        return host, port


def _start(spec: RunSpec, job: bytes, planner: Planner, chaos: Chaos | None) -> Any:
    """The run's controller, new. One that is still at work is left alone: LeaseHeld."""
    run = run_key(spec.storage_path, spec.name)
    while True:
        take_over(run, spec)
        with contextlib.suppress(ActorAlreadyExistsError):  # another driver began at the same moment
            return _created(run, spec, job, planner, chaos)


def _created(run: str, spec: RunSpec, job: bytes, planner: Planner, chaos: Chaos | None) -> Any:
    return (
        remote(Controller, max_concurrency=32)
        .options(
            name=controller_name(run),
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            # Beside the driver: a soft affinity lets Ray put it on a node that may be lost next.
            scheduling_strategy=NodeAffinitySchedulingStrategy(ray_private.this_node(), soft=False),
            runtime_env={"env_vars": process_environment()},
        )
        .remote(
            run=run,
            spec=spec,
            job=job,
            planner=planner,
            environment=process_environment(),
            driver=DriverProcess.here(),
            faults=(chaos.schedule, chaos.labels) if chaos is not None else None,
        )
    )


def _grace_s() -> float:
    """Seconds from a SIGTERM to the SIGKILL that follows it when a Ray job is stopped."""
    return float(os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", JOB_STOP_WAIT_S))


def _ray_ends_s() -> float:
    """For how long Ray tries to reach a head that is gone."""
    return float(os.environ.get(RAY_RECONNECTS, RAY_ENDS_S))


def absolute(path: str) -> str:
    """A submitted job works in a copy of its directory, which Ray removes: paths start at home there."""
    address = parse(path)
    if address.protocol:
        return path
    copied = RAY_COPIES in Path.cwd().parts
    return str((Path.home() if copied else Path.cwd()) / address.root)


def _check_nodes(spec: RunSpec, token: Token) -> None:
    """Refuse storage that some node cannot use, and nodes on which nothing can begin, before step 1.
    StorageUnavailable where that may pass.
    """
    there = hosts()
    if len(there) < 2:
        return
    url = child_url(spec.storage_path, spec.name)
    problems = problems_of(url, token, there, within_s=spec.timing.start_worker_s, trouble_raises=True)
    if problems.storage:
        raise ConfigError(
            field="run_config.storage_path",
            problem=f"{spec.storage_path} can't be used from {', '.join(sorted(problems.storage))}: "
            f"{next(iter(problems.storage.values()))}",
            remedy="Use storage that every node sees, such as s3:// or a shared file system.",
        )
    if problems.room:
        raise ConfigError(
            field="address",
            problem=f"{', '.join(sorted(problems.room))} can't be used: {next(iter(problems.room.values()))}",
        )
