"""What a worker needs, and how many a node has room for."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_train.cluster.controller.autoscaler_demand import bundles, slots_of
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
