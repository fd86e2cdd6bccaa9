"""Ray Train's elastic run through a trace, in a process and a cluster of its own: run by benchmarks.spot.

The same model, batch, cluster and trace as ours. A step is split over the workers that there are, gradients
are exchanged once a step, checkpoints made as Ray Train's documentation recommends. Rank 0 notes each step
that it ended in a file; the account is made from there.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.peers.ray_train_state import Replica
from benchmarks.spot.case import (
    CHECKPOINT_EVERY,
    GLOBAL_BATCH,
    MICRO_BATCH,
    START_S,
    TELL_S,
    Given,
    Waiting,
    given,
)
from benchmarks.spot.trace import Replay

LOOK_S = 0.1
RESIZE_S = 5.0  # how often it looks for more nodes, 60 by default: time is compressed for it as well
END_S = 60.0

Note = dict[str, Any]


def train(config: dict[str, Any]) -> None:
    """The loop of one worker."""
    import torch

    problem = Waiting()
    data, held = problem.dataset(), Replica(problem)
    model, optimizer, rank, world = held.model, held.optimizer, held.rank, held.world
    notes = os.open(config["notes"], os.O_APPEND | os.O_CREAT | os.O_WRONLY)

    def note(kind: str, step: int) -> None:
        if rank == 0:
            said = {"at": time.time(), "kind": kind, "step": step, "world": world, "pid": os.getpid()}
            os.write(notes, (json.dumps(said) + "\n").encode())

    step = held.step
    note("ready", step)
    micros = range(rank, GLOBAL_BATCH // MICRO_BATCH, world)
    while not Path(config["stop"]).exists():
        for micro in micros:
            first = step * GLOBAL_BATCH + micro * MICRO_BATCH
            batch = torch.stack([data[(first + i) % len(data)] for i in range(MICRO_BATCH)])
            together = micro == micros[-1] or world == 1
            with contextlib.nullcontext() if together else model.no_sync():
                loss, count = problem.loss(model(batch), batch)
                (loss / count * world * MICRO_BATCH / GLOBAL_BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        note("step", step)
        if step % CHECKPOINT_EVERY == 0:
            held.report(step)


def run(case: Given) -> dict[str, Any]:
    from elastic_train.cluster.driver.launch import prepare_local_environment
    from elastic_train.cluster.local_cluster import LocalCluster

    prepare_local_environment()
    with (
        tempfile.TemporaryDirectory(prefix="rt-spot-") as storage,
        LocalCluster(case.trace[0].nodes) as cluster,
    ):
        notes, stop = Path(storage) / "notes.jsonl", Path(storage) / "stop"
        failed: list[str] = []
        submitted = time.time()
        thread = threading.Thread(target=_fit, args=(case, storage, notes, stop, failed), daemon=True)
        thread.start()
        replay, reported = Replay(cluster, case.trace, seed=case.seed), submitted
        while not failed and not replay.over(time.time(), case.seconds):
            now, seen = time.time(), _read(notes)
            if any(note["kind"] == "step" for note in seen):
                replay.begin(now)
            elif now - submitted > START_S:
                failed.append(f"no step within {START_S:.0f} s")
            replay.due(now, cluster.kill_node)
            if now - reported > TELL_S:
                reported, found = now, account(seen, now - submitted)
                said = f"{now - submitted:.0f} s: step {found['reached']}, {replay.nodes} nodes"
                case.tell({"progress": said, **found, "changes": replay.done})
            time.sleep(LOOK_S)
        ended = (replay.begun or time.time()) + case.seconds  # also where it gave up before
        seen = [note for note in _read(notes) if note["at"] <= ended]
        stop.touch()
        thread.join(END_S if not failed else 0.0)
        problem = {"problem": failed[0]} if failed else {}
        begun = replay.begun or ended
        since = account([note for note in seen if note["at"] >= begun], case.seconds)["goodput"]
        return {
            **account(seen, ended - submitted),
            "after_start": since,
            "changes": replay.done,
            **problem,
        }


def account(notes: list[Note], wall_s: float) -> dict[str, Any]:
    """Each step counts once, with the seconds of its first execution, as far as the last lineage goes."""
    ran = [
        (after["step"], after["at"] - before["at"])
        for before, after in pairwise(notes)
        if after["kind"] == "step" and before["pid"] == after["pid"]
    ]
    reached = ran[-1][0] if ran else 0
    first: dict[int, float] = {}
    for step, seconds in ran:
        if step <= reached:
            first.setdefault(step, seconds)
    good_s = sum(first.values())
    return {
        "goodput": good_s / wall_s,
        "good_s": good_s,
        "wall_s": wall_s,
        "reached": reached,
        "steps": len(first),
        "steps_redone": len(ran) - len(first),
        "groups": sum(note["kind"] == "ready" for note in notes),
    }


def _fit(case: Given, storage: str, notes: Path, stop: Path, failed: list[str]) -> None:
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        train,
        train_loop_config={"notes": str(notes), "stop": str(stop)},
        scaling_config=ScalingConfig(
            num_workers=(1, case.most),
            resources_per_worker={"CPU": 1},
            elastic_resize_monitor_interval_s=RESIZE_S,
        ),
        run_config=RunConfig(
            name="spot",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=100),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    try:
        trainer.fit()
    except Exception as error:  # noqa: BLE001 - whatever ends the peer's run is its result
        if not stop.exists():
            failed.append(f"{type(error).__name__}: {error}".splitlines()[0])


def _read(notes: Path) -> list[Note]:
    lines = notes.read_text().splitlines() if notes.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


if __name__ == "__main__":
    chosen = given(__doc__ or "")
    chosen.tell(run(chosen))
    os._exit(0)  # Ray Train's thread would wait for a cluster that is gone
