"""One growth of Ray Train's elastic run, in a process and a cluster of its own: run by benchmarks.switch.

The same model, batch and nodes as ours, saved as Ray Train's documentation recommends and looking for more
nodes as often as it can. Rank 0 notes each step that it ended in a file; the gap comes from there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.notes import Note, Notebook, newest, read, wait
from benchmarks.peers.ray_train_state import Replica
from benchmarks.peers.step import train_step
from benchmarks.problem import Problem
from benchmarks.switch.cases import CASES, CHECKPOINT_EVERY, GLOBAL_BATCH, MICRO_BATCH, SETTLED

WORKERS = CASES["dp"].workers  # at first
RESIZE_S = 1.0  # how often it looks for more nodes, 60 by default
END_S = 60.0


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
    problem: Problem = config["problem"]
    data, held = problem.dataset(), Replica(problem)
    step = held.step
    notes.note("ready", step)
    while not Path(config["stop"]).exists():
        train_step(
            problem,
            data,
            held.model,
            held.optimizer,
            step,
            rank=held.rank,
            world=held.world,
            global_size=GLOBAL_BATCH,
            micro_size=MICRO_BATCH,
        )
        step += 1
        notes.note("step", step)
        if step % CHECKPOINT_EVERY == 0:
            held.report(step)


def measured(notes: Sequence[Note]) -> dict[str, Any]:
    """The gap between the last step of the old group and the first of the new one that was not run before."""
    own = [n for n in notes if n["kind"] == "step" and n["rank"] == 0]
    change = next(((a, b) for a, b in itertools.pairwise(own) if b["world"] > a["world"]), None)
    if change is None:
        return {"problem": "the group did not grow in time"}
    last, first = change
    before = [n for n in own if n["at"] <= last["at"] and n["world"] == last["world"]]
    seconds = sorted(b["at"] - a["at"] for a, b in itertools.pairwise(before))
    step_s = seconds[len(seconds) // 2]
    fresh = next((n for n in own if n["at"] >= first["at"] and n["step"] > last["step"]), None)
    return {
        "gap_s": first["at"] - last["at"],
        "gap_steps": (first["at"] - last["at"]) / step_s,
        "gap_to_fresh_s": None if fresh is None else fresh["at"] - last["at"],
        "step_s": step_s,
        "steps_redone": last["step"] - first["step"] + 1,
    }


def run(size: str) -> dict[str, Any]:
    from elastic_train.cluster.driver.launch import prepare_local_environment
    from elastic_train.cluster.local_cluster import LocalCluster

    prepare_local_environment()
    with (
        tempfile.TemporaryDirectory(prefix="rt-bench-") as storage,
        LocalCluster(WORKERS, cpus=1) as cluster,
    ):
        notes, stop = Path(storage) / "notes.jsonl", Path(storage) / "stop"
        failed: list[str] = []
        settled = SETTLED[size]
        thread = threading.Thread(target=_fit, args=(size, storage, notes, stop, failed), daemon=True)
        thread.start()
        asked = 0.0
        if wait(lambda: newest(notes)["step"] > 2 * settled, failed):
            asked = time.time()
            cluster.add_node()
            wait(lambda: _grown(notes, settled), failed)
        stop.touch()
        thread.join(END_S)
        found = measured(read(notes))
    return {**found, **({"problem": failed[0]} if failed and "gap_s" not in found else {}), "asked": asked}


def _grown(notes: Path, settled: int) -> bool:
    own = [n for n in read(notes) if n["kind"] == "step" and n["rank"] == 0]
    before = max((n["step"] for n in own if n["world"] == WORKERS), default=0)
    return any(n["world"] > WORKERS and n["step"] > before + settled for n in own)


def _fit(size: str, storage: str, notes: Path, stop: Path, failed: list[str]) -> None:
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        train,
        train_loop_config={"notes": str(notes), "stop": str(stop), "problem": Problem(size=size)},
        scaling_config=ScalingConfig(
            num_workers=(1, WORKERS + 1),
            resources_per_worker={"CPU": 1},
            elastic_resize_monitor_interval_s=RESIZE_S,
        ),
        run_config=RunConfig(
            name="switch",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    try:
        trainer.fit()
    except Exception as error:  # noqa: BLE001 - whatever ends the peer's run is its result
        if not stop.exists():
            failed.append(f"{type(error).__name__}: {error}".splitlines()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    given.json.write_text(json.dumps(run(given.size), indent=1))
    os._exit(0)  # Ray Train's thread would wait for a cluster that is gone


if __name__ == "__main__":
    main()
