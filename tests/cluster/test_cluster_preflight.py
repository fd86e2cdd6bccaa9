"""Storage is tried out from every node before a run relies on it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_train.cluster.driver.cluster_preflight import Problems, nodes, problems_of
from elastic_train.cluster.driver.launch import prepare_local_environment
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.cluster.process_room import WORKER
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.preflight import Token, probe
from tests.places.conftest import few_processes

pytestmark = [pytest.mark.ring3, pytest.mark.matrix, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    prepare_local_environment()
    with LocalCluster(2) as cluster:
        yield cluster


def test_what_a_node_cannot_see_is_told_by_node(cluster: LocalCluster, tmp_path: Path) -> None:
    there = nodes()
    assert len(there) == 3  # the head is one
    token = probe(open_store(str(tmp_path)))
    assert problems_of(str(tmp_path), token, there, within_s=60.0) == Problems()
    never = Token(path="preflight/elsewhere", value=b"written on a disk of another machine")
    problems = problems_of(str(tmp_path), never, there, within_s=60.0).storage
    assert problems.keys() == there.keys()
    assert all("can't be seen here" in problem for problem in problems.values())
    assert open_store(str(tmp_path)).list() == [token.path]  # the nodes' own are gone


def test_a_node_on_which_no_worker_can_begin_is_told(cluster: LocalCluster, tmp_path: Path) -> None:
    there = nodes()
    token = probe(open_store(str(tmp_path)))
    assert problems_of(str(tmp_path), token, there, within_s=60.0) == Problems()  # what answers is there now
    narrow = cluster.nodes[0].node_id
    with few_processes(10_000) as group:
        processes = cluster.processes(narrow)
        try:
            for pid in processes:
                (group / "cgroup.procs").write_text(str(pid))
            used = int((group / "pids.current").read_text())
            (group / "pids.max").write_text(str(used + WORKER // 2))
            found = problems_of(str(tmp_path), token, there, within_s=60.0)
        finally:
            for pid in processes:
                (group.parent / "cgroup.procs").write_text(str(pid))
    assert found.storage == {}
    assert [there[name] for name in found.room] == [narrow]
    assert "podPidsLimit" in next(iter(found.room.values()))


def test_the_doctor_asks_every_node(cluster: LocalCluster, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "elastic-train"), "doctor", str(tmp_path / "runs")]
    command += ["--address", cluster.cluster.address]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("the same works there") == 3
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
