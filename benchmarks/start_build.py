"""What does a start cost that builds the model as its own code does?

python -m benchmarks.start_build [--quick] [--json FILE]

A rank's part of a start is done in a process of its own, in turns, for a Llama-like model of 100 million and
of 1 billion parameters in fp32: `plain` is `task.model()` in a script; `built` gives a fresh run its first
values, from that same model; `by module` initialises module by module, which is what a model gets that a node
has no room for; `resume` makes shards for values that come from elsewhere. `two ranks` are two processes of
one node that build at the same time: the slower one's time, the bytes of both. Seconds are without imports,
bytes are the peak of resident memory beyond what was there before. A size that this machine has no memory for
is left out.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import nn

import elastic_train as et
from benchmarks import record
from elastic_train.config import RunSpec
from elastic_train.models.llama import Llama
from elastic_train.models.sizes import LlamaConfig
from elastic_train.planner.plan import Mesh, Plan, even_shares
from elastic_train.train.assemble import assemble
from elastic_train.train.model.plain_build import seed_as_a_script_does
from elastic_train.train.state.initial_values import give_values
from elastic_train.train.user_code_guard import UserCodeGuard

SIZES = {
    "100M": LlamaConfig(dim=768, layers=14, heads=12, kv_heads=12, hidden=2048),
    "1B": LlamaConfig(dim=2048, layers=20, heads=16, kv_heads=16, hidden=5504),
}
WAYS = ("plain", "built", "by module", "resume")
ROUNDS, QUICK_ROUNDS = 7, 3
BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Problem(et.Task):
    """A model and what a task must have beside it."""

    size: str

    def model(self) -> nn.Module:
        return Llama(SIZES[self.size])

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named_params])

    def dataset(self) -> list[torch.Tensor]:
        return [torch.zeros(9, dtype=torch.int64)]

    def loss(self, output: torch.Tensor, micro_batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return output.sum(), len(micro_batch)


def prepare(way: str, size: str) -> dict[str, float]:
    """Do it in this process; seconds, and bytes at the peak."""
    task, process = Problem(size=size), psutil.Process()
    spec = RunSpec(
        name="start",
        storage_path="/nowhere",
        batch=et.Batch(global_size=1, micro_size=1),
        max_steps=1,
        min_workers=1,
        max_workers=1,
    )
    before, start = process.memory_info().rss, time.perf_counter()
    if way == "plain":
        seed_as_a_script_does(0)
        made: Any = task.model()
    else:
        plan = Plan(mesh=Mesh(), workers=("w",), nodes=("n",), shares=even_shares(1, 1))
        guard = UserCodeGuard(worker="w", node="n", rank=0, generation=1, broken=lambda: False)
        device = torch.device("cpu")
        made = assemble(task, spec, generation=1, rank=0, plan=plan, mesh=None, device=device, guard=guard)
        if way != "resume":
            made.by_module = way == "by module"
            give_values(task, spec, made)
    seconds = time.perf_counter() - start
    del made
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "bytes": float(max(0, peak - before))}


def started(way: str, size: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.start_build", "--one", way, size]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def measured(way: str, size: str, ranks: int = 1) -> dict[str, float]:
    """Of processes that start together, the slowest one's seconds and the bytes of all."""
    running = [started(way, size) for _ in range(ranks)]
    outputs = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(f"{way} of {size} failed")
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {"seconds": max(f["seconds"] for f in found), "bytes": sum(f["bytes"] for f in found)}


def rounds_of(size: str, rounds: int, together: bool) -> list[dict[str, Any]]:
    cases = [(way, way, 1) for way in WAYS] + [("two ranks", "built", 2)] * together
    found: list[dict[str, Any]] = []
    for number in range(rounds):
        for name, way, ranks in cases:
            found.append({"size": size, "way": name, "round": number, **measured(way, size, ranks)})
    return found


def middle(results: Sequence[dict[str, Any]], size: str, way: str, of: str) -> float | None:
    return record.median(r[of] for r in results if (r["size"], r["way"]) == (size, way))


def main() -> int:
    parser: argparse.ArgumentParser = record.options(__doc__ or "")
    parser.add_argument("--size", choices=SIZES, help="of this size alone")
    parser.add_argument("--one", nargs=2, metavar=("WAY", "SIZE"), help="one measurement, as JSON")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(prepare(*given.one)))
        return 0
    results: list[dict[str, Any]] = []
    for size, config in SIZES.items():
        if given.size not in (None, size):
            continue
        with torch.device("meta"):
            model_bytes = BYTES * sum(p.numel() for p in Llama(config).parameters())
        room = psutil.virtual_memory().available
        if 2.5 * model_bytes > room:  # a model and its shards
            print(
                f"{size}: left out, {model_bytes / 2**30:.1f} GiB of a model and {room / 2**30:.1f} GiB free"
            )
            continue
        print(f"{size}: {model_bytes / 2**30:.2f} GiB of parameters", flush=True)
        rounds = QUICK_ROUNDS if given.quick else ROUNDS
        results += rounds_of(size, rounds, together=5 * model_bytes < room)
    sizes = list(dict.fromkeys(r["size"] for r in results))
    rows = [
        (
            size,
            way,
            middle(results, size, way, "seconds"),
            (middle(results, size, way, "bytes") or 0.0) / 2**30,
        )
        for size in sizes
        for way in (*WAYS, "two ranks")
    ]
    print("\n" + record.table(("parameters", "way", "seconds", "peak GiB"), rows))
    headline: dict[str, float | None] = {}
    for size in sizes:
        seconds = {way: middle(results, size, way, "seconds") for way in (*WAYS, "two ranks")}
        headline[f"start_build_x_{size}"] = record.ratio(seconds["built"], seconds["plain"])
        headline[f"resume_x_{size}"] = record.ratio(seconds["resume"], seconds["plain"])
    record.finish(record.record("start_build", results=results, headline=headline), given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
