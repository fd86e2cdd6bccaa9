"""Does the planner know which plan is fastest?

python -m benchmarks.planner [--published] [--quick] [--json FILE]

Every mesh of four workers trains the same small Llama on this machine (gloo processes, without Ray), in
turns; so does the planner's own choice among all meshes of one to four workers. What the planner is told was
measured in `benchmarks/planner/machine.py`; all workers share the cores. Reported are the rank correlation
(Spearman) of predicted and measured step times, and the measured time of the chosen plan over that of the
fastest one, beside the spread of that plan's repetitions.

With `--published` nothing is run: predicted memory and speed are set beside published runs on GPUs.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time

import numpy as np
import torch

import elastic_train as et
from benchmarks import record
from benchmarks.planner.machine import Machine
from benchmarks.planner.published import published
from benchmarks.planner.rank_correlation import rank_correlation
from benchmarks.problem import Problem
from elastic_train.config import Parallelism, RunSpec
from elastic_train.planner.choose_plan import choose
from elastic_train.planner.plan import Infeasible, Mesh, Plan, WorkerSlot
from elastic_train.planner.problem import Problem as Sought
from elastic_train.planner.scoring import Scored
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool

WORKERS = 4
BATCH = et.Batch(global_size=16, micro_size=2)
STEPS, QUICK_STEPS, WARM_UP = 7, 4, 2
ROUNDS, QUICK_ROUNDS = 5, 1
LIMIT_S = 300.0
"""No round begins later than this after the first."""
SIZE, SEQ_LEN = "small", 64
WORKER_SLOTS = tuple(WorkerSlot(worker=f"w{i}", node="n0") for i in range(WORKERS))
AXES = ("pp", "dp_replicate", "dp_shard", "tp")


def spec(steps: int = STEPS) -> RunSpec:
    return RunSpec(
        name="planner",
        storage_path="memory://planner",
        batch=BATCH,
        max_steps=steps,
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


def step_s(gang: Gang, plan: Plan) -> float:
    """The median step of a fresh generation under a plan."""
    gang.form(plan)
    return statistics.median(r.seconds for r in gang.run()[WARM_UP:])


def scored(machine: Machine, constraints: Parallelism) -> Scored | None:
    """The planner's choice on the four workers; None where it has none."""
    sought = Sought(
        worker_slots=WORKER_SLOTS,
        shape=machine.shape,
        hardware=machine.hardware,
        micro_batches=BATCH.micro_batches,
        constraints=constraints,
        virtual=(1,),
        zero_bubble=True,
    )
    found = choose(sought)
    return None if isinstance(found, Infeasible) else found[0]


def plans_of(machine: Machine) -> dict[str, Scored]:
    """The planner's choice first, then the best plan of every mesh of four."""
    chosen = scored(machine, Parallelism())
    assert chosen is not None
    found = {name_of(chosen): chosen}
    for mesh in meshes(WORKERS):
        best = scored(machine, Parallelism(**{axis: getattr(mesh, axis) for axis in AXES}))
        if best is not None and best.plan.mesh == mesh:
            found.setdefault(name_of(best), best)
    return found


def name_of(found: Scored) -> str:
    split = ", split" if found.plan.schedule == "ZeroBubble" else ""
    return f"{found.plan.mesh}{split}"


def measured(gang: Gang, plans: dict[str, Scored], rounds: int) -> dict[str, list[float]]:
    """Median steps of every plan, by round; all plans in turns."""
    began = time.perf_counter()
    times: dict[str, list[float]] = {name: [] for name in plans}
    for number in range(rounds):
        if number and time.perf_counter() - began > LIMIT_S * (rounds - 1) / rounds:
            break
        print(f"round {number + 1} of {rounds}", flush=True)
        for name, found in plans.items():
            times[name].append(step_s(gang, found.plan))
    return times


def main() -> int:
    options = record.options(__doc__ or "")
    options.add_argument(
        "--published", action="store_true", help="compare with published runs on GPUs instead"
    )
    given = options.parse_args()
    if given.published:
        return published(given.json)
    torch.set_num_threads(1)
    task = Problem(size=SIZE, seq_len=SEQ_LEN)
    with GlooPool(WORKERS) as pool:
        gang = Gang(pool, task, spec(QUICK_STEPS if given.quick else STEPS))
        machine = Machine.of(gang, task, lambda plan: step_s(gang, plan))
        print("told:", *(f"{name} {value:.3g}" for name, value in machine.reported().items()), flush=True)
        plans = plans_of(machine)
        times = measured(gang, plans, QUICK_ROUNDS if given.quick else ROUNDS)
    middle = {name: statistics.median(of_plan) for name, of_plan in times.items()}
    chosen, best = next(iter(plans)), min(middle, key=lambda name: middle[name])
    of_four = [name for name, found in plans.items() if found.plan.mesh.size == WORKERS]
    results = [
        {
            "plan": name,
            "predicted_s": plans[name].cost.step_s,
            "measured_s": middle[name],
            "spread": (max(times[name]) - min(times[name])) / middle[name],
            "chosen": name == chosen,
        }
        for name in sorted(plans, key=lambda name: middle[name])
    ]
    print("\n" + record.table(tuple(results[0]), [tuple(row.values()) for row in results]))
    whole = record.record(
        "planner",
        results=results,
        headline={
            "rank_correlation": rank_correlation(
                [plans[name].cost.step_s for name in of_four], [middle[name] for name in of_four]
            ),
            "chosen_over_best": middle[chosen] / middle[best],
            "spread": (max(times[chosen]) - min(times[chosen])) / middle[chosen],
        },
        reported=machine.reported(),
        rounds=len(times[chosen]),
        fastest=best,
    )
    record.finish(whole, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
