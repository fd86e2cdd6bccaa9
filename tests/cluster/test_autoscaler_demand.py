"""What a worker needs, and how many a node has room for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.cluster.controller.autoscaler_demand import Demand, bundles, slots_of
from elastic_train.config import Batch, RunSpec

pytestmark = pytest.mark.ring0
GPU_NODE = {"CPU": 32.0, "GPU": 8.0, "accelerator_type:H100": 1.0, "memory": 1e12}


def spec(**changes: Any) -> RunSpec:
    given = {"name": "r", "storage_path": "/s", "batch": Batch(global_size=8, micro_size=1), "max_steps": 1}
    return RunSpec(**given | {"min_workers": 1, "max_workers": 2, **changes})


def test_a_node_has_room_by_what_is_scarcest():
    assert slots_of(spec(), {"CPU": 3.0}) == 3
    assert slots_of(spec(cpus_per_worker=2.0), {"CPU": 3.0}) == 1
    assert slots_of(spec(gpus_per_worker=1.0), {"CPU": 3.0}) == 0
    assert slots_of(spec(gpus_per_worker=1.0, cpus_per_worker=8.0), GPU_NODE) == 4
    assert slots_of(spec(gpus_per_worker=1.0), GPU_NODE) == 8


def test_nodes_with_another_accelerator_have_no_room():
    wants = spec(gpus_per_worker=1.0, accelerator="H100")
    assert slots_of(wants, GPU_NODE) == 8
    assert slots_of(wants, {"CPU": 32.0, "GPU": 8.0, "accelerator_type:A100": 1.0}) == 0


def test_the_autoscaler_is_asked_for_every_worker_and_the_standby():
    wanted = bundles(spec(gpus_per_worker=1.0, accelerator="H100", standby=1))
    assert wanted == [{"CPU": 1.0, "GPU": 1.0, "accelerator_type:H100": 0.001}] * 3


def test_ray_trains_scaling_config_names_the_accelerator():
    from ray.train import ScalingConfig

    import elastic_train as et
    from tests.tasks.tiny import TinyTask

    scaling = ScalingConfig(num_workers=(1, 2), use_gpu=True, accelerator_type="H100")
    batch = et.Batch(global_size=8, micro_size=1, seed=0)
    made = et.ElasticTrainer(TinyTask(), batch=batch, max_steps=1, scaling_config=scaling)
    assert (made.spec.accelerator, made.spec.gpus_per_worker) == ("H100", 1.0)


class Cluster:
    """What runs note, who is at work, and the request that stands: the last one that anybody made."""

    def __init__(self) -> None:
        self.noted: dict[str, bytes] = {}
        self.at_work: set[str] = set()
        self.current: list[dict[str, float]] = []
        self.labels: list[dict[str, str]] = []

    def put(self, key: str, value: bytes) -> None:
        self.noted[key] = value

    def delete(self, key: str) -> None:
        self.noted.pop(key, None)

    def all(self) -> dict[str, bytes]:
        return dict(self.noted)

    def request(self, wanted: list[dict[str, float]], labels: list[dict[str, str]]) -> None:
        self.current, self.labels = wanted, labels

    def demand(self, run: str, **changes: Any) -> Demand:
        is_there = self.at_work.__contains__
        return Demand(run, spec(**changes), notes=self, request=self.request, is_there=is_there)


SIZES = {"a": 1, "b": 3, "c": 6}


@given(st.lists(st.tuples(st.sampled_from(sorted(SIZES)), st.sampled_from(["ask", "release", "kill"]))))
def test_whoever_starts_ends_or_is_killed_in_whatever_order_the_others_keep_their_request(
    order: list[tuple[str, str]],
) -> None:
    cluster = Cluster()
    runs = {run: cluster.demand(run, max_workers=size, standby=0) for run, size in SIZES.items()}
    for run, what in order:
        if what == "ask":
            cluster.at_work.add(run)
            runs[run].ask()
        elif run in cluster.at_work:
            cluster.at_work.discard(run)
            if what == "release":
                runs[run].release()
    cluster.current = []  # a stranger's request for its own alone
    for run in cluster.at_work:  # each asks again from time to time
        runs[run].ask()
    assert len(cluster.current) == sum(SIZES[run] for run in cluster.at_work)


def test_a_run_that_ends_lets_go_of_its_own_and_of_nothing_else() -> None:
    cluster = Cluster()
    one, other = cluster.demand("one", max_workers=2), cluster.demand("other", max_workers=4)
    cluster.at_work |= {"one", "other"}
    one.ask()
    other.ask()
    assert len(cluster.current) == 3 + 5
    one.release()
    assert len(cluster.current) == 5
    other.release()
    assert cluster.current == []


def test_a_run_that_does_not_ask_leaves_the_request_of_the_cluster_alone() -> None:
    cluster = Cluster()
    cluster.current = [{"CPU": 7.0}]
    quiet = cluster.demand("quiet", ask_autoscaler=False)
    quiet.ask()
    quiet.release()
    assert cluster.current == [{"CPU": 7.0}]
    assert not cluster.noted
