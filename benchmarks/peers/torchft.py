"""One recovery of torchft, in processes of its own: run by benchmarks.recovery, where torchft is installed.

Every worker is a replica group of its own beside a lighthouse; nothing is saved, a new replica takes the
state of another one. At its best setting: heartbeats and gloo that give up after a second, the quorum found
while the forward runs, a scheduler that starts a new process at once, and one all-reduce of all gradients,
because its own wrapper of a model ends the survivors of a peer that dies in it. Survivors commit steps of
smaller batches meanwhile: `kill_to_step_s` is the first of those, `kill_to_whole_s` the first with all.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.peers.notes import Note, Notebook, due, newest, read, step_seconds, wait
from benchmarks.problem import LEARNING_RATE, Problem
from benchmarks.recovery.cases import CASES, KEEP_ON, Case, sigkill

HEARTBEAT_MS, JOIN_MS, TICK_MS = 1000, 1000, 100
COLLECTIVE_S, QUORUM_S = 1.0, 60.0


def absent(python: Path) -> str:
    """Why torchft cannot run there; empty if it can."""
    if not python.exists():
        return f"there is no {python}: make bench-peers"
    ask = "import importlib.util as i, sys; sys.exit(i.find_spec('torchft') is None)"
    found = subprocess.run([str(python), "-c", ask], check=False)
    return f"torchft is not installed in {python}" if found.returncode else ""


def train(directory: Path, replica: int, workers: int, lighthouse: str) -> None:
    """The loop of one replica, until it is ended."""
    import torch
    from torch.distributed import TCPStore
    from torch.nn.utils import parameters_to_vector, vector_to_parameters
    from torchft import Manager, Optimizer, ProcessGroupGloo  # pyright: ignore[reportMissingImports]

    from benchmarks.peers.step import train_step

    notes = Notebook(str(directory / "notes.jsonl"), rank=replica, world=workers, node=str(replica))
    notes.note("entered", 0)
    torch.set_num_threads(1)
    problem = Problem()
    data, bare = problem.dataset(), problem.model()
    inner = torch.optim.AdamW(bare.parameters(), lr=LEARNING_RATE)

    def load(state: dict[str, Any]) -> None:
        bare.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=COLLECTIVE_S)),
        min_replica_size=1,
        rank=0,
        world_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": bare.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica_{replica}",
        hostname="localhost",
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        quorum_timeout=timedelta(seconds=QUORUM_S),
    )

    class Averaged(Optimizer):
        """The update by the mean of the gradients of all who take part."""

        def step(self, closure: None = None) -> None:
            gradients = [p.grad for p in bare.parameters() if p.grad is not None]
            mean = parameters_to_vector(gradients)
            manager.allreduce(mean).wait()
            vector_to_parameters(mean, gradients)
            super().step(closure)

    optimizer = Averaged(manager, inner)
    optimizer.zero_grad()  # begins the first quorum
    notes.note("ready", manager.current_step())
    while True:
        before = manager.current_step()
        train_step(problem, data, bare, optimizer, before, rank=replica, world=workers)
        if manager.current_step() > before:
            notes.note("step", manager.current_step(), together=manager.num_participants())


def measure(notes: Sequence[Note], killed_at: float, workers: int) -> dict[str, Any] | None:
    """From the kill to the first committed step of survivors, and to the first that all replicas share."""
    late = [n for n in notes if n["kind"] == "step" and n["at"] > killed_at]
    known = {n["pid"] for n in notes if n["at"] <= killed_at}
    smaller = [n for n in late if n["pid"] in known and n["together"] < workers]
    whole = [n for n in late if n["pid"] not in known and n["together"] == workers]
    if not smaller and not whole:
        return None
    first = min(smaller or whole, key=lambda n: n["at"])
    return {
        "kill_to_step_s": first["at"] - killed_at,
        "kill_to_whole_s": min((n["at"] for n in whole), default=killed_at) - killed_at if whole else None,
        "kill_to_regained_s": first["at"] - killed_at,
        "first_step": first["step"],
        "steps_redone": 0,
        "from": "live",
        "workers": first["together"],
    }


def run(case: Case) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="ft-bench-") as storage,
        _lighthouse(Path(storage)) as address,
        _replicas(case, Path(storage), address) as replicas,
    ):
        notes = Path(storage) / "notes.jsonl"
        failed: list[str] = []
        killed_at, found = None, None
        if wait(lambda: due(notes, case.workers), failed):
            lost = range(case.workers - (case.cpus if case.kills == "node" else 1), case.workers)
            at = newest(notes)["step"]
            killed_at = sigkill(replicas[number].pid for number in lost)
            if case.spare:
                replicas += [_replica(case, Path(storage), number, address) for number in lost]
            wanted = "kill_to_whole_s" if case.spare else "kill_to_step_s"

            def is_over() -> bool:
                now = measure(read(notes), killed_at, case.workers)
                return bool(now and now[wanted] is not None) and newest(notes)["step"] > at + KEEP_ON

            wait(is_over, failed)
            found = measure(read(notes), killed_at, case.workers)
        steps = read(notes)
    problem = "never killed" if killed_at is None else "did not come back in time"
    return {**(found or {"problem": problem}), "step_s": step_seconds(steps), "events": []}


@contextmanager
def _lighthouse(directory: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("torchft_lighthouse")),
        *("--bind", f"[::]:{port}", "--min_replicas", "1", "--quorum_tick_ms", str(TICK_MS)),
        *("--join_timeout_ms", str(JOIN_MS), "--heartbeat_timeout_ms", str(HEARTBEAT_MS)),
    ]
    with (directory / "lighthouse.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield f"http://localhost:{port}"
    finally:
        process.kill()
        process.wait()


@contextmanager
def _replicas(case: Case, directory: Path, lighthouse: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(case.workers):
            started.append(_replica(case, directory, number, lighthouse))
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def _replica(case: Case, directory: Path, number: int, lighthouse: str) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "benchmarks.peers.torchft", case.name),
        *("--work", str(directory), "--replica", str(number), "--lighthouse", lighthouse),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (directory / f"replica{number}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=Path, help="train as a replica, with its files there")
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--lighthouse", default="")
    given = parser.parse_args()
    case = CASES[given.case]
    if given.work is not None:
        train(given.work, given.replica, case.workers, given.lighthouse)
    given.json.write_text(json.dumps(run(case), indent=1))


if __name__ == "__main__":
    main()
