"""Does the planner know which plan is fastest?

python -m benchmarks.planner [--quick] [--json FILE]

Every mesh of four workers trains the same small Llama on this machine (gloo processes, without Ray), in
turns; so does the planner's own choice among all meshes of one to four workers. The planner is given what
it would be given in a run: the layers with the seconds that one worker was measured to need for them, the
optimizer's time, the latency and bandwidth between two processes, and that all workers share the cores.
Reported are the rank correlation (Spearman) of predicted and measured step times, and the measured time of
the chosen plan over that of the fastest one, beside the spread of that plan's repetitions.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import elastic_train as et
from benchmarks import record
from benchmarks.problem import Problem
from elastic_train.config import Parallelism, RunSpec
from elastic_train.planner.choose import choose
from elastic_train.planner.hardware import Hardware, Link
from elastic_train.planner.plan import Infeasible, Mesh, Plan, Seat
from elastic_train.planner.problem import Problem as Sought
from elastic_train.planner.scoring import Scored
from elastic_train.planner.shape import ModelShape
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.train.profile import profiled_shape

WORKERS = 4
BATCH = et.Batch(global_size=16, micro_size=2)
STEPS, WARM_UP = 8, 3
ROUNDS, QUICK_ROUNDS = 5, 1
SIZE, SEQ_LEN = "small", 64
SEATS = tuple(Seat(worker=f"w{i}", node="n0") for i in range(WORKERS))
AXES = ("pp", "dp_replicate", "dp_shard", "tp")

State = dict[str, Any]
_generations = itertools.count(1)


def spec() -> RunSpec:
    return RunSpec(
        name="planner",
        storage_path="memory://planner",
        batch=BATCH,
        max_steps=STEPS,
        min_workers=1,
        max_workers=WORKERS,
        clip_norm=1.0,
    )


def meshes(size: int) -> list[Mesh]:
    """Every factorisation over the axes."""
    found = [
        dict(zip(AXES, sizes, strict=True))
        for sizes in itertools.product(range(1, size + 1), repeat=len(AXES))
        if int(np.prod(sizes)) == size
    ]
    return [Mesh(**sizes) for sizes in found]


def ping(state: State, nbytes: int, times: int) -> float:
    """Seconds of one message from rank 0 to rank 1, half of there and back; in a formed group of two."""
    data = torch.zeros(nbytes // 4)
    rank = dist.get_rank()
    began = time.perf_counter()
    for _ in range(times):
        (dist.send if rank == 0 else dist.recv)(data, 1 - rank)
        (dist.recv if rank == 0 else dist.send)(data, 1 - rank)
    return (time.perf_counter() - began) / times / 2


def link(gang: Gang) -> Link:
    """Latency and bandwidth between two processes of the machine."""
    gang.form(gang.plan(2, 1))
    small, large = 64, 8 << 20
    latency = max(gang.pool.run(ping, small, 200, ranks=[0, 1]))
    seconds = max(gang.pool.run(ping, large, 10, ranks=[0, 1]))
    return Link(latency_s=latency, bytes_per_s=large / max(seconds - latency, 1e-9))


def update_s(task: Problem) -> float:
    """The optimizer's seconds for one element, on one core."""
    model = task.model()
    optimizer = task.optimizer(model.named_parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times) / sum(p.numel() for p in model.parameters())


def step_s(gang: Gang, plan: Plan) -> float:
    """The median step of a fresh generation under a plan."""
    gang.form(plan)
    return statistics.median(r.seconds for r in gang.run()[WARM_UP:])


def scored(shape: ModelShape, hardware: Hardware, constraints: Parallelism) -> Scored | None:
    """The planner's choice on the four workers; None where it has none."""
    sought = Sought(
        seats=SEATS,
        shape=shape,
        hardware=hardware,
        micro_batches=BATCH.micro_batches,
        constraints=constraints,
        virtual=(1,),
    )
    found = choose(sought)
    return None if isinstance(found, Infeasible) else found[0]


def calibrated(gang: Gang, task: Problem) -> tuple[ModelShape, Hardware]:
    """Layers and machine as the planner is told of them: all measured here."""
    per_element = update_s(task)
    shape = profiled_shape(task, spec(), flops_per_s=1.0)
    alone = statistics.median(step_s(gang, gang.plan(1, 1)) for _ in range(3))
    computing = alone - per_element * shape.parameters
    scale = computing / BATCH.micro_batches / sum(row.seconds for row in shape.layers)
    layers = tuple(replace(row, seconds=row.seconds * scale) for row in shape.layers)
    between = link(gang)
    hardware = Hardware(
        inside=between,
        between=between,
        cores=len(os.sched_getaffinity(0)),
        one_machine=True,
        update_s=per_element,
    )
    return replace(shape, layers=layers), hardware


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's: Pearson's of the ranks."""
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def main() -> int:
    given = record.options(__doc__ or "").parse_args()
    rounds = QUICK_ROUNDS if given.quick else ROUNDS
    torch.set_num_threads(1)
    task = Problem(size=SIZE, seq_len=SEQ_LEN)
    with GlooPool(WORKERS) as pool:
        gang = Gang(pool, _generations, task, spec())
        shape, hardware = calibrated(gang, task)
        chosen = scored(shape, hardware, Parallelism())
        assert chosen is not None
        plans: dict[str, Scored] = {str(chosen.plan.mesh): chosen}
        for mesh in meshes(WORKERS):
            fixed = Parallelism(**{axis: getattr(mesh, axis) for axis in AXES})
            found = scored(shape, hardware, fixed)
            if found is not None and found.plan.mesh == mesh:
                plans[str(mesh)] = found
        measured: dict[str, list[float]] = {name: [] for name in plans}
        for number in range(rounds):
            for name, found in plans.items():
                print(f"round {number + 1} of {rounds}: {name}", flush=True)
                measured[name].append(step_s(gang, found.plan))
    middle = {name: statistics.median(times) for name, times in measured.items()}
    best = min(middle, key=lambda name: middle[name])
    of_four = [name for name, found in plans.items() if found.plan.mesh.size == WORKERS]
    mine = measured[str(chosen.plan.mesh)]
    results = [
        {
            "plan": name,
            "predicted_s": found.cost.step_s,
            "measured_s": middle[name],
            "spread": (max(measured[name]) - min(measured[name])) / middle[name],
            "chosen": name == str(chosen.plan.mesh),
        }
        for name, found in sorted(plans.items(), key=lambda item: middle[item[0]])
    ]
    print("\n" + record.table(tuple(results[0]), [tuple(row.values()) for row in results]))
    whole = record.record(
        "planner",
        results=results,
        headline={
            "rank_correlation": rank_correlation(
                [plans[name].cost.step_s for name in of_four], [middle[name] for name in of_four]
            ),
            "chosen_over_best": middle[str(chosen.plan.mesh)] / middle[best],
            "spread": (max(mine) - min(mine)) / statistics.median(mine),
        },
        link={"latency_s": hardware.inside.latency_s, "bytes_per_s": hardware.inside.bytes_per_s},
        fastest=best,
    )
    record.finish(whole, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
