"""One recovery of Ray Train, in a process and a cluster of its own: run by benchmarks.recovery.

The same model, batch, cluster and kill as ours, saved and loaded as Ray Train's documentation recommends.
Every rank notes each step that it ended in one file; the times come from there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

from benchmarks.peers.notes import Note, Notebook, due, is_back, measure, newest, read, step_seconds, wait
from benchmarks.peers.ray_train_state import Replica
from benchmarks.peers.step import train_step
from benchmarks.problem import Problem
from benchmarks.recovery.cases import CASES, CHECKPOINT_EVERY, KEEP_ON, Case, sigkill

END_S = 60.0  # how long the run may take to its own end once everything is measured


def train(config: dict[str, Any]) -> None:
    """The loop of one worker."""
    import ray
    from ray import train as ray_train

    context = ray_train.get_context()
    notes = Notebook(
        config["notes"],
        rank=context.get_world_rank(),
        world=context.get_world_size(),
        node=ray.get_runtime_context().get_node_id(),
    )
    notes.note("entered", 0)
    problem = Problem(size=config["size"])
    data, held = problem.dataset(), Replica(problem)
    step = held.step
    notes.note("ready", step)
    while step < _last_step(config["stop"]):
        train_step(problem, data, held.model, held.optimizer, step, rank=held.rank, world=held.world)
        step += 1
        notes.note("step", step)
        if step % CHECKPOINT_EVERY == 0:
            held.report(step)


def _last_step(stop: str) -> float:
    """The step to end at, once the driver has chosen one that no rank reached yet."""
    file = Path(stop)
    return int(file.read_text()) if file.exists() else math.inf


def run(case: Case) -> dict[str, Any]:
    from elastic_train.cluster.driver.launch import prepare_local_environment
    from elastic_train.cluster.local_cluster import LocalCluster

    prepare_local_environment()
    with (
        tempfile.TemporaryDirectory(prefix="rt-bench-") as storage,
        LocalCluster(case.nodes + case.spare, cpus=case.cpus) as cluster,
    ):
        notes, stop = Path(storage) / "notes.jsonl", Path(storage) / "stop"
        failed: list[str] = []
        thread = threading.Thread(target=_fit, args=(case, storage, notes, stop, failed), daemon=True)
        thread.start()
        killed_at: float | None = None
        found: Note | None = None
        if wait(lambda: due(notes, case.workers, case.kill_after), failed):
            victim = max(read(notes), key=lambda n: (n["rank"], n["step"]))
            pids = [victim["pid"]] if case.kills == "worker" else cluster.processes(victim["node"])
            killed_at = sigkill(pids)
            wait(lambda: is_back(notes, killed_at, case.planned), failed)
            found = measure(read(notes), killed_at, case.planned)
        whole = stop.with_suffix(".new")
        whole.write_text(str(newest(notes)["step"] + KEEP_ON))
        whole.rename(stop)
        thread.join(END_S)
        steps = read(notes)
    problem = failed[0] if failed else "never killed" if killed_at is None else "did not come back in time"
    return {**(found or {"problem": problem}), "step_s": step_seconds(steps), "events": []}


def _fit(case: Case, storage: str, notes: Path, stop: Path, failed: list[str]) -> None:
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    elastic = case.least < case.workers
    trainer = TorchTrainer(
        train,
        train_loop_config={"notes": str(notes), "stop": str(stop), "size": case.size},
        scaling_config=ScalingConfig(
            num_workers=(case.least, case.workers) if elastic else case.workers,
            resources_per_worker={"CPU": 1},
        ),
        run_config=RunConfig(
            name=case.name,
            storage_path=storage,
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    try:
        trainer.fit()
    except Exception as error:  # noqa: BLE001 - whatever ends the peer's run is its result
        failed.append(f"{type(error).__name__}: {error}".splitlines()[0])


def absent() -> str:
    """Why Ray Train cannot run here; empty if it can."""
    try:
        from ray.train.torch import TorchTrainer
    except ImportError as error:
        return str(error)
    return "" if TorchTrainer else "no TorchTrainer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    why = absent()
    found = {"absent": why} if why else run(CASES[given.case])
    given.json.write_text(json.dumps(found, indent=1))
    os._exit(0)  # Ray Train's thread would wait for a cluster that is gone


if __name__ == "__main__":
    main()
