"""A step once one of four workers computes at half the speed, beside what uneven shares could give.

Run by benchmarks.overhead: `python -m benchmarks.overhead.slow_node --json FILE`. A micro-batch takes the
time that its loss sleeps, so that four workers on two cores do not slow each other. From a step on the
forwards and backwards of one worker sleep too, until its micro-batches take twice as long. The ideal is the
least time that any division of the micro-batches could take, by what they took before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import elastic_train as et
from benchmarks.problem import Problem
from elastic_train.cluster.driver.launch import fit, prepare_local_environment
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.config import RunSpec
from elastic_train.control.events import StepCommitted
from elastic_train.control.fault_schedule import FaultSchedule, Moment, SlowNode

WORKERS, MICRO_BATCHES = 4, 28
PACE_S = 0.04
SLOWED_S = 0.045  # of each micro-batch: as much as it takes, the computation included
SLOW_FROM, STEPS, SETTLED = 20, 60, 15  # SETTLED steps are counted before and at the end


@dataclass(frozen=True, kw_only=True)
class PacedProblem(Problem):
    def loss(self, output: torch.Tensor, micro_batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(PACE_S)
        return super().loss(output, micro_batch)


def ideal_s(micro_s: float, slow_s: float) -> float:
    """Of the ways to divide the micro-batches between the slow worker and the others, the fastest."""
    others = WORKERS - 1
    return min(
        max(-((own - MICRO_BATCHES) // others) * micro_s, own * slow_s) for own in range(MICRO_BATCHES + 1)
    )


def measure() -> dict[str, Any]:
    prepare_local_environment()
    slow = SlowNode(when=Moment(step=SLOW_FROM), node=f"n{WORKERS - 1}", seconds=SLOWED_S / 2)
    with tempfile.TemporaryDirectory(prefix="et-bench-") as storage, LocalCluster(WORKERS, cpus=1) as cluster:
        spec = RunSpec(
            name="slow",
            storage_path=storage,
            batch=et.Batch(global_size=MICRO_BATCHES, micro_size=1),
            max_steps=STEPS,
            min_workers=WORKERS,
            max_workers=WORKERS,
            standby=0,
        )
        chaos = Chaos(cluster, FaultSchedule(faults=(slow,)), lambda text: None)
        problem = PacedProblem(size="nano", seq_len=16)
        result = fit(problem, spec, address=None, local_nodes=0, quiet=True, chaos=chaos)
        steps = [r.event for r in result.records if isinstance(r.event, StepCommitted)]
    seconds = {event.step: event.seconds for event in steps}
    before = statistics.median(seconds[step] for step in range(SLOW_FROM - SETTLED, SLOW_FROM))
    after = statistics.median(seconds[step] for step in range(STEPS - SETTLED, STEPS))
    micro_s = before / (MICRO_BATCHES / WORKERS)
    ideal = ideal_s(micro_s, micro_s + SLOWED_S)
    generations = {event.step: event.generation for event in steps}
    changed = [
        step for step in generations if step > SLOW_FROM and generations[step] > generations[SLOW_FROM]
    ]
    return {
        "step_s": before,
        "step_slowed_s": max(seconds[step] for step in range(SLOW_FROM, SLOW_FROM + 3)),
        "step_shared_s": after,
        "ideal_step_s": ideal,
        "slow_node_ratio": after / ideal,
        "steps_until_shares_follow": min(changed) - SLOW_FROM if changed else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    found = measure()
    parser.parse_args().json.write_text(json.dumps(found))
    os._exit(0)  # what Ray still has to end is nobody's measurement


if __name__ == "__main__":
    main()
