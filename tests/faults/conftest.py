"""Runs on a real local cluster: one cluster a module, many faults a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import ray

from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.cluster.driver.launch import fit, prepare_local_environment
from elastic_train.cluster.driver.result import Result
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.cluster.ray_private import draining_nodes
from elastic_train.config import Checkpoints, RunSpec, Timing
from elastic_train.control.fault_schedule import FaultSchedule
from elastic_train.observe.journal_records import Record, from_json
from elastic_train.storage.fsspec_store import child_url, open_store
from elastic_train.storage.journal import read_journal
from elastic_train.testing.single_process_run import train_alone
from jobs.pretrain_lm import trainer

Calm = dict[int, tuple[int, float]]
"""The digest of the samples and the loss, by step."""
TIMING = Timing(join_window_s=1.0, lease_s=5.0, wait_for_capacity_s=120.0)
WHOLE = dataclasses.replace(TIMING, join_window_s=60.0)
"""The first group waits for all workers, however far apart they come."""


class Runs:
    """Starts runs of the small language model on the module's cluster."""

    def __init__(self, cluster: LocalCluster, storage: Path) -> None:
        self.cluster, self.storage = cluster, storage
        self._calm: dict[tuple[int, int], Calm] = {}

    def spec(self, name: str, **changes: Any) -> tuple[Any, RunSpec]:
        sizes = {key: changes.pop(key) for key in ("global_size", "max_steps") if key in changes}
        job = trainer(
            size="nano",
            dropout=0.1,
            storage=str(self.storage),
            name=name,
            workers=changes.pop("workers", "2:3"),
            **sizes,
        )
        changes = {
            "timing": TIMING,
            "checkpoints": Checkpoints(every=5, keep=2),
            "max_failures": 20,
        } | changes
        return job.task, dataclasses.replace(job.spec, **changes)

    def calm(self, *, steps: int, global_size: int = 12) -> Calm:
        """The run of one process that others are compared with."""
        key = (steps, global_size)
        if key not in self._calm:
            reports = train_alone(*self.spec("calm", max_steps=steps, global_size=global_size))
            self._calm[key] = {r.step: (r.ids_digest, r.loss) for r in reports}
        return self._calm[key]

    def records(self, name: str) -> list[Record]:
        """What a run's storage knows of it."""
        store = open_store(child_url(str(self.storage), name))
        return [from_json(line) for _, part in read_journal(store) for line in part]

    def saved(self, name: str) -> int:
        """The step of a run's newest checkpoint."""
        newest = RunDirectory(open_store(child_url(str(self.storage), name))).newest()
        return newest.step if newest is not None else 0

    def disturbed(self, name: str, schedule: FaultSchedule, **changes: Any) -> Result:
        return self._under(schedule, *self.spec(name, **changes))

    def compared(self, task: Any, spec: RunSpec, schedule: FaultSchedule) -> Result:
        """A disturbed run that has the steps and losses of the same one in a single process."""
        rough = self._under(schedule, task, spec)
        alone = train_alone(task, dataclasses.replace(spec, name="alone"))
        assert_same_training(rough, {r.step: (r.ids_digest, r.loss) for r in alone})
        return rough

    def _under(self, schedule: FaultSchedule, task: Any, spec: RunSpec) -> Result:
        print(f"seed {schedule.seed}: {[str(f) for f in schedule.faults]}")
        chaos = Chaos(self.cluster, schedule, print)
        return fit(task, spec, address=None, local_nodes=0, quiet=False, chaos=chaos)


class Clusters:
    """One cluster at a time; it serves the next module too if that wants the same and it is still whole."""

    def __init__(self) -> None:
        self._size = (0, 0)
        self._cluster: LocalCluster | None = None
        self._nodes: set[str] = set()

    def of(self, nodes: int, cpus: int) -> LocalCluster:
        if self._cluster is None or self._size != (nodes, cpus) or living() != self._nodes:
            self.close()
            self._size, self._cluster = (nodes, cpus), LocalCluster(nodes, cpus=cpus)
            self._nodes = living()
        return self._cluster

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
        self._cluster = None


def living() -> set[str]:
    return {n["NodeID"] for n in ray.nodes() if n["Alive"]} - set(draining_nodes())


SHARED = Clusters()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """The cluster ends with the last test of this folder: a process is in one at most."""
    try:
        return (yield)
    finally:
        if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
            SHARED.close()


@pytest.fixture(scope="session")
def clusters() -> Clusters:
    prepare_local_environment()
    return SHARED


@pytest.fixture(scope="module")
def runs(
    clusters: Clusters, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Runs:
    """On a cluster of `NODES` nodes of `CPUS` CPUs, as the module says."""
    module = request.module
    return Runs(clusters.of(module.NODES, module.CPUS), tmp_path_factory.mktemp("runs"))


def assert_same_training(rough: Result, calm: Calm, *, relative: float = 1e-5) -> None:
    """Every step once, on the same samples, with the same losses."""
    assert rough.outcome == "finished"
    assert {e.step: e.ids_digest for e in rough.ledger.kept} == {step: ids for step, (ids, _) in calm.items()}
    assert len(rough.ledger.kept) == len(calm)
    losses = {step: loss for step, (_, loss) in calm.items()}
    assert rough.ledger.losses == pytest.approx(losses, rel=relative)


def assert_copies_and_logs_spare_every_step(rough: Result) -> None:
    """While a copy or a log is left no committed step is run again."""
    source = {r.formed.generation: r.formed.source for r in rough.records if r.formed is not None}
    again = {source[entry.superseded_by] for entry in rough.ledger.superseded if entry.superseded_by}
    assert not again & {"live", "replay"}
