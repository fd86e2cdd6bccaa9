from __future__ import annotations

import pytest

from elastic_train.config import Batch, RunSpec
from elastic_train.control.fault_schedule import KillNode, Moment, storm
from elastic_train.control.policy import Policy
from elastic_train.testing.simulated_planners import SimplePlanner

pytestmark = pytest.mark.ring0


def test_a_policy_is_what_the_run_was_configured_with():
    spec = RunSpec(
        name="gpt",
        storage_path="/runs",
        batch=Batch(global_size=64, micro_size=4),
        max_steps=100,
        min_workers=2,
        max_workers=8,
        standby=2,
        max_failures=5,
        cpus_per_worker=2.0,
        gpus_per_worker=1.0,
        accelerator="H100",
    )
    policy = Policy.of(spec, SimplePlanner())
    assert (policy.min_workers, policy.max_workers, policy.target) == (2, 8, 10)
    assert (policy.max_steps, policy.max_failures) == (100, 5)
    assert policy.tick_s == spec.timing.heartbeat_s
    assert policy.each == " of 2 CPU and 1 GPU on H100"


def test_the_same_seed_gives_the_same_faults():
    def made(seed: int):
        return storm(seed, steps=30, nodes=("a", "b"), ranks=2, faults=8)

    assert made(3) == made(3)
    assert made(3) != made(4)
    assert made(3).seed == 3


def test_a_moment_reads_as_a_place_in_the_run():
    assert str(KillNode(when=Moment(step=7, phase="vote"), node="b").when) == "vote of step 7"
