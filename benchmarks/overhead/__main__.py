"""How much longer is a step than in a bare torch loop, and in a whole run than in a loop of Ray Train?

python -m benchmarks.overhead [--quick] [--json FILE]

Two gloo processes train the same model on the same batches twice, in turns step by step: a step of the
engine (without Ray), then a step of a plain FSDP2 or DDP loop in the same processes, and so on, so that
whatever else the machine does hits both. Both do AdamW and clip the norm of the gradient. The ratio of each
pair is taken, the slower rank's time on both sides; reported is the median. The same is said of the processor
time of both ranks, which does not grow when the machine is busy with other things.

Whole runs are measured one after another, each in a cluster of its own (whole_run.py), in turns. And in one
run a worker becomes half as fast (slow_node.py).

The bare step runs inside the engine's `on_step` callback, between a vote and the optimizer: from the end of
one callback to the next is one whole step of the engine.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import elastic_train as et
from benchmarks import program, record
from benchmarks.overhead.whole_run import System
from benchmarks.problem import Problem
from elastic_train.config import RunSpec
from elastic_train.data.order import SampleOrder
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.train.state.compare_replicas import compare_replicas
from elastic_train.train.step.training_loop import StepReport

BATCH = et.Batch(global_size=8, micro_size=2)  # 2 micro-batches per rank and step
CLIP_NORM = 1.0
WORKERS = 2
MESHES = {"FSDP2": (1, WORKERS), "DDP": (WORKERS, 1)}  # dp_replicate, dp_shard
WARM_UP = 5
COMPARISONS = 21
PAIRS, QUICK_PAIRS = 150, 20
WHOLE_RUNS = {"20ms": 500, "100ms": 200, "1s": 40}  # steps
QUICK_CASE, QUICK_STEPS, TURNS = "100ms", 80, 3
LIMIT_S = 1800.0

State = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Seconds on the wall's clock and on this process's processor clock."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Reading:
        return cls(wall=time.perf_counter(), cpu=time.process_time())

    def __sub__(self, earlier: Reading) -> Reading:
        return Reading(wall=self.wall - earlier.wall, cpu=self.cpu - earlier.cpu)


class BareLoop:
    """What one writes without us: shard or replicate, accumulate, clip, step."""

    def __init__(self, problem: Problem, sharded: bool, rank: int) -> None:
        self._problem, self._data = problem, problem.dataset()
        order = SampleOrder(len(self._data), BATCH)
        self._mine = lambda step: order.micro_batches(step)[rank::WORKERS]
        torch.manual_seed(0)
        model = problem.model()
        if sharded:
            mesh = init_device_mesh("cpu", (WORKERS,))
            for layer in model.layers:  # type: ignore[union-attr]
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self._model: nn.Module = model if sharded else DistributedDataParallel(model)
        self._optimizer = problem.optimizer(model.named_parameters())

    def step(self, number: int) -> None:
        mine = self._mine(number)
        for at, micro in enumerate(mine):
            last = at == len(mine) - 1
            if isinstance(self._model, FSDPModule):
                self._model.set_requires_gradient_sync(last)
            else:
                self._model.require_backward_grad_sync = last
            batch = torch.stack([self._data[i] for i in micro.ids])
            loss, count = self._problem.loss(self._model(batch), batch)
            (loss / count / len(mine)).backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIP_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()


class InTurns:
    """The engine's `on_step`: notes when the engine's step ended and does one bare step."""

    def __init__(self, bare: BareLoop) -> None:
        self._bare = bare
        self._began: Reading | None = None
        self.pairs: list[tuple[Reading, Reading]] = []

    def __call__(self, report: StepReport) -> None:
        ended = Reading.now()
        dist.barrier()
        bare_began = Reading.now()
        self._bare.step(report.step)
        bare_ended = Reading.now()
        dist.barrier()
        if self._began is not None:
            self.pairs.append((ended - self._began, bare_ended - bare_began))
        self._began = Reading.now()


def take_turns(state: State, problem: Problem, sharded: bool) -> None:
    """In a pool process, when its group is formed."""
    rank = dist.get_rank()
    state["turns"] = state["on_step"] = InTurns(BareLoop(problem, sharded, rank))


def pairs_of(state: State) -> list[tuple[Reading, Reading]]:
    return state["turns"].pairs


def comparisons(state: State, generation: int, step_s: float) -> list[float]:
    """What comparing replicas adds to a step, as a share: its seconds over those of the steps between."""
    (shards,) = state["member"].held.of(generation)
    shares: list[float] = []
    for _ in range(COMPARISONS):
        dist.barrier()
        began = time.perf_counter()
        steps = compare_replicas(shards, shards.step, step_s)
        shares.append((time.perf_counter() - began) / (steps * step_s))
    return shares


def compare(pool: GlooPool, name: str, problem: Problem, pairs: int) -> list[dict[str, Any]]:
    """Seconds of each pair of steps, the slower rank's; where there are replicas, and of comparing them."""
    spec = RunSpec(
        name="overhead",
        storage_path="memory://overhead",
        batch=BATCH,
        max_steps=WARM_UP + pairs + 1,
        min_workers=WORKERS,
        max_workers=WORKERS,
        clip_norm=CLIP_NORM,
    )
    replicate, shard = MESHES[name]
    gang = Gang(pool, problem, spec)
    gang.form(gang.plan(replicate, shard))
    pool.run(take_turns, problem, shard > 1)
    outcomes = gang.begin().results(LIMIT_S)
    errors = [error for end, error, _ in outcomes if end is None]
    if errors:
        raise RuntimeError(errors[0])
    by_rank = pool.run(pairs_of)
    steps = [
        {
            "system": f"elastic_train and {name}",
            "repetition": number,
            "step_s": max(ours.wall for ours, _ in ranks),
            "bare_step_s": max(bare.wall for _, bare in ranks),
            "cpu_s": sum(ours.cpu for ours, _ in ranks),
            "bare_cpu_s": sum(bare.cpu for _, bare in ranks),
        }
        for number, ranks in enumerate(zip(*by_rank, strict=True))
        if number >= WARM_UP
    ]
    if replicate > 1:
        step_s = record.median(s["step_s"] for s in steps)
        shares = pool.run(comparisons, gang.generation, step_s)
        costs = {
            "compare_cost_ratio": 1.0 + statistics.median(max(ranks) for ranks in zip(*shares, strict=True))
        }
        steps = [step | costs for step in steps]
    return steps


def measured(name: str, *words: str) -> dict[str, Any]:
    found = program.measured(program.command_of(f"benchmarks.overhead.{name}", *words), LIMIT_S)
    if "problem" in found:
        raise RuntimeError(found["problem"])
    return found


def whole_runs(quick: bool) -> list[dict[str, Any]]:
    """Each system in turn, so that whatever else the machine does hits all."""
    found: list[dict[str, Any]] = []
    for turn in range(1 if quick else TURNS):
        for case, steps in {QUICK_CASE: QUICK_STEPS}.items() if quick else WHOLE_RUNS.items():
            for system in get_args(System):
                print(f"a whole run of {system}: {steps} steps of about {case}", flush=True)
                run = measured("whole_run", system, case, "--steps", str(steps))
                found.append({"repetition": turn, **run})
    return found


def beside(
    found: Sequence[dict[str, Any]], system: System, case: str, what: str, other: System = "Ray Train"
) -> float | None:
    """The median over the turns of a figure in times of another system's of the same turn."""
    by = {(r["repetition"], r["system"]): r[what] for r in found if r["case"] == case}
    turns = {turn for turn, _ in by}
    return record.median(record.ratio(by[turn, system], by[turn, other]) for turn in turns)


def summary(results: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    def middle(of: Callable[[dict[str, Any]], float]) -> float | None:
        return record.median(of(r) for r in results)

    return {
        "step_s": middle(lambda r: r["step_s"]),
        "bare_step_s": middle(lambda r: r["bare_step_s"]),
        "ratio": middle(lambda r: r["step_s"] / r["bare_step_s"]),
        "cpu_s": middle(lambda r: r["cpu_s"]),
        "cpu_ratio": middle(lambda r: r["cpu_s"] / r["bare_cpu_s"]),
    }


def main() -> int:
    given = record.options(__doc__ or "").parse_args()
    pairs = QUICK_PAIRS if given.quick else PAIRS
    problem = Problem(size="small", seq_len=64)
    found: dict[str, list[dict[str, Any]]] = {}
    with GlooPool(WORKERS) as pool:
        for name in MESHES:
            print(f"{name}: {pairs} pairs of steps on {WORKERS} workers", flush=True)
            found[name] = compare(pool, name, problem, pairs)
    sums = {name: summary(results) for name, results in found.items()}
    header = ("beside", "pairs", *sums["DDP"])
    rows = [(name, len(found[name]), *sums[name].values()) for name in sums]
    print("\n" + record.table(header, rows))
    runs = whole_runs(given.quick)
    cases = list(dict.fromkeys(r["case"] for r in runs))
    columns = ("step_s", "mean_step_s", "cpu_s", "start_s")
    header = ("whole run", "step", *columns, *(f"x {name}" for name in columns))
    rows = [
        (
            system,
            case,
            *(
                record.median(r[c] for r in runs if (r["system"], r["case"]) == (system, case))
                for c in columns
            ),
            *(beside(runs, system, case, column) for column in columns),
        )
        for case in cases
        for system in get_args(System)
    ]
    print("\n" + record.table(header, rows))
    print("a worker of four becomes half as fast", flush=True)
    slow = measured("slow_node")
    print("\n" + record.table(tuple(slow), [tuple(slow.values())]))
    whole = record.record(
        "overhead",
        results=[*(r for results in found.values() for r in results), *runs, slow],
        headline={
            "step_time_ratio": sums["FSDP2"]["ratio"],
            "step_cpu_ratio": sums["FSDP2"]["cpu_ratio"],
            "ddp_step_time_ratio": sums["DDP"]["ratio"],
            "ddp_step_cpu_ratio": sums["DDP"]["cpu_ratio"],
            "compare_cost_ratio": found["DDP"][0]["compare_cost_ratio"],
            **{f"whole_run_ratio_{c}": beside(runs, "elastic_train", c, "mean_step_s") for c in cases},
            **{f"whole_run_cpu_ratio_{c}": beside(runs, "elastic_train", c, "cpu_s") for c in cases},
            **{
                f"peer_snapshots_ratio_{c}": beside(
                    runs, "elastic_train", c, "mean_step_s", "without peer snapshots"
                )
                for c in cases
            },
            "start_x_vs_ray_train": beside(runs, "elastic_train", QUICK_CASE, "start_s"),
            "slow_node_ratio": slow["slow_node_ratio"],
        },
    )
    record.finish(whole, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
