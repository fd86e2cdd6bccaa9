"""One recovery of torchrun, in processes of its own: run by benchmarks.recovery.

An agent stands for a node, with two workers. The same model, batch and kill as ours, data parallel over gloo;
rank 0 saves a file every few steps and all ranks load it when they start. After a failure torchrun restarts
every worker. At its best setting: its agents look after their workers every 0.1 s, keep alive every second,
wait a second for more of them, and make a new store for each group. By default restarted workers share the
agent's store, read there the addresses of the group before, and restart for ever.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks.peers.notes import Notebook, due, is_back, measure, read, step_seconds, wait
from benchmarks.peers.step import train_step
from benchmarks.problem import LEARNING_RATE, Problem
from benchmarks.recovery.cases import CASES, CHECKPOINT_EVERY, Case, sigkill

RESTARTS = 20
MONITOR_S, LAST_CALL_S, KEEP_ALIVE_S = 0.1, 1, 1
COLLECTIVE_S = 60.0
TAG = "BENCHMARK_NODE"


def train(directory: Path) -> None:
    """The loop of one worker, until it is ended."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    notes = Notebook(str(directory / "notes.jsonl"), rank=rank, world=world, node=os.environ[TAG])
    notes.note("entered", 0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_S))
    problem = Problem()
    data, bare = problem.dataset(), problem.model()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=LEARNING_RATE)
    step, saved = 0, directory / "state.pt"
    if saved.exists():
        state = torch.load(saved)
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    model = torch.nn.parallel.DistributedDataParallel(bare)
    notes.note("ready", step)
    while True:
        train_step(problem, data, model, optimizer, step, rank=rank, world=world)
        step += 1
        notes.note("step", step)
        if rank == 0 and step % CHECKPOINT_EVERY == 0:
            state = {"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").rename(saved)


def run(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tr-bench-") as storage, _agents(case, Path(storage)) as agents:
        notes = Path(storage) / "notes.jsonl"
        failed: list[str] = []
        killed_at, found = None, None
        if wait(lambda: due(notes, case.workers), failed):
            # The first agent serves the rendezvous: without it torchrun never comes back.
            others = [n for n in read(notes) if n["node"] != "0"]
            victim = max(others, key=lambda n: (n["rank"], n["step"]))
            agent = agents[int(victim["node"])]
            pids = [victim["pid"]] if case.kills == "worker" else [agent.pid, *_below(agent)]
            killed_at = sigkill(pids)
            wait(lambda: is_back(notes, killed_at, case.planned), failed)
            found = measure(read(notes), killed_at, case.planned)
        steps = read(notes)
    problem = "never killed" if killed_at is None else "did not come back in time"
    return {**(found or {"problem": problem}), "step_s": step_seconds(steps), "events": []}


@contextmanager
def _agents(case: Case, directory: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One for each node; ended with everything below them."""
    port = _free_port()
    spare = case.spare and case.kills == "node"
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(case.nodes + spare):
            started.append(_agent(case, directory, number, port))
        yield started
    finally:
        for agent in started:
            for pid in (*_below(agent), agent.pid):
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()
            agent.wait()


def _agent(case: Case, directory: Path, number: int, port: int) -> subprocess.Popen[bytes]:
    least = max(1, case.least // case.cpus)
    meeting = {
        "is_host": int(number == 0),
        "last_call_timeout": LAST_CALL_S,
        "keep_alive_interval": KEEP_ALIVE_S,
    }
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", f"{least}:{case.nodes}", "--nproc-per-node", str(case.cpus)),
        *("--max-restarts", str(RESTARTS), "--monitor-interval", str(MONITOR_S)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", case.name),
        *("--rdzv-conf", ",".join(f"{key}={value}" for key, value in meeting.items())),
        *("--local-addr", "127.0.0.1"),
        *("-m", "benchmarks.peers.torchrun", case.name, "--work", str(directory)),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        TAG: str(number),
    }
    with (directory / f"agent{number}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def _below(agent: subprocess.Popen[bytes]) -> list[int]:
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(agent.pid).children(recursive=True)]
    return []


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=Path, help="train as a worker, with its files there")
    given = parser.parse_args()
    if given.work is not None:
        train(given.work)
    else:
        given.json.write_text(json.dumps(run(CASES[given.case]), indent=1))


if __name__ == "__main__":
    main()
