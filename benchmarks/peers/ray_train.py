"""One recovery of Ray Train, in a process and a cluster of its own: run by recovery.py.

The same model, batch, cluster and kill as ours, saved and loaded as Ray Train's documentation recommends:
rank 0 writes a directory and gives it to `report`, every rank reads `get_checkpoint` when it starts. Every
rank notes each step that it ended in one file; the times come from there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import (
    CASES,
    CHECKPOINT_EVERY,
    GIVE_UP_S,
    GLOBAL_BATCH,
    KEEP_ON,
    KILL_AFTER,
    MICRO_BATCH,
    Case,
    sigkill,
)
from benchmarks.problem import LEARNING_RATE, Problem

POLL_S = 0.01
END_S = 60.0  # how long the run may take to its own end once everything is measured

Note = dict[str, Any]


def train(config: dict[str, Any]) -> None:
    """The loop of one worker."""
    import ray
    import torch
    from ray import train as ray_train
    from ray.train import Checkpoint
    from ray.train.torch import prepare_model

    context = ray_train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    me = {
        "rank": rank,
        "world": world,
        "pid": os.getpid(),
        "node": ray.get_runtime_context().get_node_id(),
    }
    notes = os.open(config["notes"], os.O_APPEND | os.O_CREAT | os.O_WRONLY)

    def note(kind: str, step: int) -> None:
        os.write(notes, (json.dumps({"at": time.time(), "kind": kind, "step": step, **me}) + "\n").encode())

    note("entered", 0)
    torch.set_num_threads(1)
    problem = Problem()
    data = problem.dataset()
    model = prepare_model(problem.model())
    bare = model.module if world > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    step, checkpoint = 0, ray_train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            saved = torch.load(Path(directory) / "state.pt")
        bare.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    note("ready", step)
    while step < _last_step(config["stop"]):
        for micro in range(rank, GLOBAL_BATCH // MICRO_BATCH, world):
            first = step * GLOBAL_BATCH + micro * MICRO_BATCH
            batch = torch.stack([data[(first + i) % len(data)] for i in range(MICRO_BATCH)])
            loss, count = problem.loss(model(batch), batch)
            (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        note("step", step)
        if step % CHECKPOINT_EVERY:
            continue
        if rank == 0:
            with tempfile.TemporaryDirectory() as directory:
                state = {"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, Path(directory) / "state.pt")
                ray_train.report({"step": step}, checkpoint=Checkpoint.from_directory(directory))
        else:
            ray_train.report({"step": step})


def _last_step(stop: str) -> float:
    """The step to end at, once the driver has chosen one that no rank reached yet."""
    file = Path(stop)
    return int(file.read_text()) if file.exists() else math.inf


def run(case: Case) -> dict[str, Any]:
    from elastic_train.cluster.launch import prepare_local_environment
    from elastic_train.cluster.local import LocalCluster

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
        if _wait(lambda: _due(notes, case.workers), failed):
            victim = max(_read(notes), key=lambda n: (n["rank"], n["step"]))
            pids = [victim["pid"]] if case.kills == "worker" else cluster.processes(victim["node"])
            killed_at = sigkill(pids)
            _wait(lambda: _regained(notes, killed_at, case.planned), failed)
            found = measure(_read(notes), killed_at, case.planned)
        whole = stop.with_suffix(".new")
        whole.write_text(str(_newest(notes)["step"] + KEEP_ON))
        whole.rename(stop)
        thread.join(END_S)
        steps = _read(notes)
    problem = failed[0] if failed else "never killed" if killed_at is None else "did not come back in time"
    return {**(found or {"problem": problem}), "step_s": _step_seconds(steps), "events": []}


def _fit(case: Case, storage: str, notes: Path, stop: Path, failed: list[str]) -> None:
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    elastic = case.least < case.workers
    trainer = TorchTrainer(
        train,
        train_loop_config={"notes": str(notes), "stop": str(stop)},
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


def measure(notes: Sequence[Note], killed_at: float, planned: int) -> dict[str, Any] | None:
    """From the kill until all `planned` ranks of a new group ended a step, although that step is run again.

    `kill_to_regained_s`: until they ended one that was never run before.
    """
    old = {n["pid"] for n in notes if n["at"] <= killed_at}
    reached = max((n["step"] for n in notes if n["pid"] in old and n["kind"] == "step"), default=0)
    new = [n for n in notes if n["pid"] not in old and n["world"] == planned]
    first, regained = _all_ended(new, planned, 0), _all_ended(new, planned, reached)
    if first is None:
        return None
    entered = [n["at"] for n in new if n["kind"] == "entered"]
    ready = [n["at"] for n in new if n["kind"] == "ready"]
    return {
        "kill_to_step_s": first[1] - killed_at,
        "kill_to_entered_s": max(entered) - killed_at,
        "kill_to_ready_s": max(ready) - killed_at,
        "kill_to_regained_s": None if regained is None else regained[1] - killed_at,
        "first_step": first[0],
        "steps_redone": reached - first[0] + 1,
        "from": "storage" if first[0] > 1 else "fresh",
        "workers": planned,
    }


def _all_ended(notes: Sequence[Note], planned: int, beyond: int) -> tuple[int, float] | None:
    """The first step greater than `beyond` that all ranks ended, and when the last one did."""
    ended: dict[int, dict[int, float]] = {}
    for n in notes:
        if n["kind"] == "step" and n["step"] > beyond:
            ended.setdefault(n["step"], {})[n["rank"]] = n["at"]
    whole = [(step, max(at.values())) for step, at in ended.items() if len(at) == planned]
    return min(whole, default=None)


def _regained(notes: Path, killed_at: float, planned: int) -> bool:
    found = measure(_read(notes), killed_at, planned)
    if found is None or found["kill_to_regained_s"] is None:
        return False
    return _newest(notes)["step"] >= found["first_step"] + found["steps_redone"] + KEEP_ON


def _due(notes: Path, workers: int) -> bool:
    newest = _newest(notes)
    return (
        newest["world"] == workers and newest["step"] > KILL_AFTER and newest["step"] % CHECKPOINT_EVERY == 5
    )


def _newest(notes: Path) -> Note:
    """The last step that rank 0 ended."""
    own = [n for n in _read(notes) if n["kind"] == "step" and n["rank"] == 0]
    return own[-1] if own else {"step": 0, "world": 0}


def _read(notes: Path) -> list[Note]:
    lines = notes.read_text().splitlines() if notes.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _wait(until: Callable[[], bool], failed: list[str]) -> bool:
    deadline = time.monotonic() + GIVE_UP_S
    while not failed and time.monotonic() < deadline:
        if until():
            return True
        time.sleep(POLL_S)
    return False


def _step_seconds(notes: Sequence[Note]) -> float | None:
    """Median from step to step on rank 0, within one process."""
    own = [n for n in notes if n["kind"] == "step" and n["rank"] == 0]
    gaps = [b["at"] - a["at"] for a, b in itertools.pairwise(own) if a["pid"] == b["pid"]]
    return statistics.median(gaps) if gaps else None


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
