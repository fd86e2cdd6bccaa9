"""A cluster that is not there is told at once, with the remedy."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.train import RunConfig, ScalingConfig

import elastic_train as et
from elastic_train.cluster.driver.launch import joined
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.cluster.ray_calls import connect, host_and_port
from elastic_train.errors import ClusterNotStarted, ConfigError
from tests.tasks.tiny import TinyTask

pytestmark = pytest.mark.ring2


def test_an_address_where_nothing_listens_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]  # bound, and nobody listens
        with pytest.raises(ConfigError, match=rf"no Ray cluster to join at 127\.0\.0\.1:{port}.*RAY_ADDRESS"):
            connect(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("10.0.0.1:6379", "10.0.0.1", 6379),
        ("[fd00::1]:6379", "fd00::1", 6379),
        ("head:6379", "head", 6379),
        ("head:", "head", 0),
    ],
)
def test_an_address_has_a_host_and_a_port(address: str, host: str, port: int) -> None:
    assert host_and_port(address) == (host, port)


def test_the_address_is_that_of_a_person_or_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert joined(None) is None
    assert joined("local") is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert joined(None) == "10.0.0.1:6379"
    assert joined("10.0.0.2:6379") == "10.0.0.2:6379"
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert joined(None) is None


@pytest.mark.parametrize(
    ("scaling", "nodes", "said"),
    [
        ({"num_workers": 4}, 3, "3 nodes has a worker on each, and num_workers asks for 4"),
        ({"num_workers": (1, 4)}, 0, "a local cluster of 0 nodes"),
        ({"num_workers": 1, "label_selector": {"market": "spot"}}, 3, "have no labels"),
    ],
)
def test_what_a_local_cluster_never_has_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scaling: dict[str, Any], nodes: int, said: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    made = et.ElasticTrainer(
        TinyTask(),
        batch=et.Batch(global_size=8, micro_size=1),
        max_steps=1,
        scaling_config=ScalingConfig(**scaling),
        run_config=RunConfig(storage_path=str(tmp_path / "runs")),
    )
    with pytest.raises(ConfigError, match=said):
        made.fit(local_nodes=nodes)
    assert not (tmp_path / "runs").exists()


@pytest.mark.ring3
@pytest.mark.timeout(300)
def test_a_local_cluster_that_does_not_come_up_is_told_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head's own store is refused, after other processes of the head have begun."""
    directory = tempfile.mkdtemp(prefix="et-", dir="/tmp")
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **where: directory)
    with pytest.raises(ClusterNotStarted, match=r"no Ray cluster came up on this machine: .*1000 bytes"):
        LocalCluster(1, object_store_bytes=1000)
    assert not ray.is_initialized()
    assert not Path(directory).exists()
    children = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert not [p for p in children if directory in " ".join(p.cmdline())]


def test_rays_client_is_refused_with_the_way_to_submit() -> None:
    with pytest.raises(ConfigError, match=r"ray://.*is for Ray's client.*ray job submit"):
        joined("ray://head:10001")
