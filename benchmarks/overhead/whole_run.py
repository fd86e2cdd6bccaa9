"""What a step of a whole run costs: ours on Ray with all that belongs to it, beside a loop of Ray Train.

Run by benchmarks.overhead, each system in a process and a cluster of its own: `python -m
benchmarks.overhead.whole_run SYSTEM CASE --steps N --json FILE`. Two workers on two nodes of one CPU train
the same model on the same batches and save every five to ten seconds. Seconds are those between two committed
steps, without the first ones; processor seconds are those of all processes that the run
started, daemons of Ray included."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import psutil

import elastic_train as et
from benchmarks.problem import Problem

System = Literal["elastic_train", "without peer snapshots", "Ray Train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and a batch, and every how many steps both systems save it."""

    size: str
    global_size: int
    micro_size: int
    save_every: int


CASES: Mapping[str, Case] = {  # by what a step takes about, on two cores with nothing else to do
    "20ms": Case(size="tiny", global_size=4, micro_size=2, save_every=250),
    "100ms": Case(size="tiny", global_size=32, micro_size=4, save_every=50),
    "1s": Case(size="small", global_size=40, micro_size=4, save_every=10),
}
WORKERS = 2
WARM_UP = 10
SAMPLE_S = 0.25


class ProcessorTime(threading.Thread):
    """Samples the processor seconds of this process and all below it, those that ended included."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="processor time")
        self._over = threading.Event()
        self._seconds: dict[tuple[int, float], float] = {}
        self._samples: list[tuple[float, float]] = []

    def run(self) -> None:
        here = psutil.Process()
        while not self._over.wait(SAMPLE_S):
            for process in (here, *here.children(recursive=True)):
                try:
                    times = process.cpu_times()
                    self._seconds[process.pid, process.create_time()] = times.user + times.system
                except psutil.Error:  # it ended meanwhile
                    continue
            self._samples.append((time.time(), sum(self._seconds.values())))

    def between(self, first: float, last: float) -> float:
        """Processor seconds between two moments of the wall's clock."""
        self._over.set()
        inside = [seconds for at, seconds in self._samples if first <= at <= last]
        return inside[-1] - inside[0] if inside else float("nan")


def ours(case: Case, steps: int, *, peers: bool) -> list[float]:
    """When each step was committed."""
    from elastic_train.cluster.driver.launch import fit, prepare_local_environment
    from elastic_train.cluster.local_cluster import LocalCluster
    from elastic_train.config import RunSpec

    prepare_local_environment()
    with tempfile.TemporaryDirectory(prefix="et-bench-") as storage, LocalCluster(WORKERS, cpus=1):
        spec = RunSpec(
            name="whole",
            storage_path=storage,
            batch=et.Batch(global_size=case.global_size, micro_size=case.micro_size),
            max_steps=steps,
            min_workers=WORKERS,
            max_workers=WORKERS,
            checkpoints=et.Checkpoints(every=case.save_every, keep=2, peers="auto" if peers else None),
            standby=0,
        )
        result = fit(Problem(size=case.size), spec, address=None, local_nodes=0, quiet=True)
        kept = result.ledger.kept  # a long run's are read from its storage
        # Short steps are journalled several at a time; each says itself what it took.
        return list(itertools.accumulate((entry.seconds for entry in kept[1:]), initial=kept[0].wall))


def ray_train(case: Case, steps: int) -> list[float]:
    """When rank 0 ended each step."""
    from ray.train import CheckpointConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from elastic_train.cluster.driver.launch import prepare_local_environment
    from elastic_train.cluster.local_cluster import LocalCluster

    prepare_local_environment()
    with tempfile.TemporaryDirectory(prefix="et-bench-") as storage, LocalCluster(WORKERS, cpus=1):
        notes = Path(storage) / "notes.json"
        TorchTrainer(
            _loop,
            train_loop_config={"case": case, "steps": steps, "notes": str(notes)},
            scaling_config=ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(
                name="whole", storage_path=storage, checkpoint_config=CheckpointConfig(num_to_keep=2)
            ),
        ).fit()
        return json.loads(notes.read_text())


def _loop(config: dict[str, Any]) -> None:
    from benchmarks.peers.ray_train_state import Replica
    from benchmarks.peers.step import train_step

    case: Case = config["case"]
    problem = Problem(size=case.size)
    sizes = {"global_size": case.global_size, "micro_size": case.micro_size}
    data, held = problem.dataset(), Replica(problem)
    ended: list[float] = []
    for step in range(config["steps"]):
        train_step(problem, data, held.model, held.optimizer, step, rank=held.rank, world=held.world, **sizes)
        ended.append(time.time())
        if (step + 1) % case.save_every == 0:
            held.report(step + 1)
    if held.rank == 0:
        Path(config["notes"]).write_text(json.dumps(ended))


def measure(system: System, name: str, steps: int) -> dict[str, Any]:
    watch = ProcessorTime()
    watch.start()
    began = time.time()
    if system == "Ray Train":
        ended = ray_train(CASES[name], steps)
    else:
        ended = ours(CASES[name], steps, peers=system == "elastic_train")
    counted = ended[WARM_UP:]
    seconds = _gaps(counted)
    return {
        "system": system,
        "case": name,
        "steps": len(seconds),
        "step_s": statistics.median(seconds),
        "mean_step_s": statistics.fmean(seconds),
        "cpu_s": watch.between(counted[0], counted[-1]) / len(seconds),
        "start_s": ended[0] - began,
    }


def _gaps(moments: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(moments)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=get_args(System))
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    found = measure(given.system, given.case, given.steps)
    given.json.write_text(json.dumps(found))
    os._exit(0)  # what Ray still has to end is nobody's measurement


if __name__ == "__main__":
    main()
