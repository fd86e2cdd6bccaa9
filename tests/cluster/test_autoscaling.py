"""A cluster that grows by itself, loses machines with and without notice, and is left as it was found."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import list_named_actors, placement_group_table

from elastic_train.cluster import ray_private
from elastic_train.cluster.actor_names import short
from elastic_train.control.events import GroupReady, NodesChanged
from elastic_train.observe.journal_records import FormedGroup
from elastic_train.testing.autoscaling import AutoscalingRay
from tests.cluster.conftest import BIN, REPOSITORY, Jobs, eventually, segments_of

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(900)]
STEPS = 70
NOTICE_S = 40.0


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    environment = {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "RAY_AUTH_MODE": "disabled",
        "RAY_worker_niceness": "0",
        "OMP_NUM_THREADS": "1",
        # The nodes share a directory, and each would unpack the job's files over those that others use.
        "PYTHONPATH": str(REPOSITORY),
    }
    with AutoscalingRay(environment, least=1, most=3) as cluster, connected(cluster):
        yield Jobs(cluster, tmp_path / "runs", copied=False)


@contextmanager
def connected(cluster: AutoscalingRay) -> Iterator[None]:
    def accepted() -> bool:  # a head that has just been started has no node to connect to yet
        try:
            ray.init(address=cluster.address, log_to_driver=False, logging_level=30)
        except ConnectionError:
            ray.shutdown()
            return False
        return True

    eventually("a connection", accepted)
    try:
        yield
    finally:
        ray.shutdown()


def test_a_submitted_job_grows_with_its_cluster_and_leaves_nothing_behind(jobs: Jobs) -> None:
    assert isinstance(jobs.cluster, AutoscalingRay)
    eventually("the first node", lambda: len(nodes()) == 1)
    options = ("--workers", "1:3", "--standby", "0", "--seconds-per-sample", "0.2")
    jobs.submit("grows", "--name", "grows", "--max-steps", str(STEPS), *options)
    large = eventually("a group of three", lambda: trains(jobs, lambda group: group.dp == 3))

    lost = large.nodes[1]
    jobs.cluster.kill(node(lost)["RayletSocketName"])
    small = eventually("a group without it", lambda: trains(jobs, lambda group: lost not in group.nodes))

    reported = small.nodes[0]
    ray_private.drain_node(node(reported)["NodeID"], NOTICE_S)
    eventually("it is left", lambda: trains(jobs, lambda group: reported not in group.nodes), NOTICE_S)
    jobs.cluster.kill(node(reported)["RayletSocketName"])

    assert jobs.end("grows") == "SUCCEEDED", jobs.log("grows")
    seen = [len(r.event.nodes) for r in jobs.records("grows") if isinstance(r.event, NodesChanged)]
    assert (seen[0], max(seen)) == (1, 3), "it asked for the nodes that it could use"
    book = jobs.ledger("grows")
    assert sorted(book.losses) == list(range(1, STEPS + 1))
    assert [entry.step for entry in book.kept] == list(range(1, STEPS + 1))
    assert book.superseded == (), "neither the loss nor the notice cost a committed step"

    jobs.submit("calm", "--name", "calm", "--max-steps", str(STEPS), "--workers", "1:1", "--standby", "0")
    assert jobs.end("calm") == "SUCCEEDED", jobs.log("calm")
    calm = jobs.ledger("calm")
    assert book.losses == pytest.approx(calm.losses, rel=1e-5)
    assert [entry.ids_digest for entry in book.kept] == [entry.ids_digest for entry in calm.kept]

    eventually("the size of an idle cluster", lambda: len(nodes()) == 1, 120.0)
    eventually("the end of its processes", lambda: not jobs.left(), 60.0)
    assert [actor for actor in list_named_actors(all_namespaces=True) if "grows" in actor["name"]] == []
    assert placement_group_table() == {}
    assert segments_of("grows", "calm") == []


def trains(jobs: Jobs, wanted: Callable[[FormedGroup], bool]) -> FormedGroup | None:
    """The newest group, if it is there and as wanted."""
    records = jobs.records("grows")
    groups = [record.formed for record in records if record.formed is not None]
    ready = {record.event.generation for record in records if isinstance(record.event, GroupReady)}
    return groups[-1] if groups and groups[-1].generation in ready and wanted(groups[-1]) else None


def nodes() -> list[dict[str, Any]]:
    """The living nodes that workers fit on."""
    return [info for info in ray.nodes() if info["Alive"] and info["Resources"].get("CPU")]


def node(name: str) -> dict[str, Any]:
    return next(info for info in ray.nodes() if short(info["NodeID"]) == name)
