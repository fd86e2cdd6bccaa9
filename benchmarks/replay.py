"""How much sooner is a lost stage back when it alone is replayed, and what does its log cost?

python -m benchmarks.replay [--quick] [--json FILE]

A pipeline of three stages (Llama of 8 layers, AdamW) trains in three processes, with the log and without it
in turns: the ratio of their steps is the logging overhead. Then each stage is restored as it began and
replayed from its neighbours' logs, by one process; the middle one by two and three, which share the
micro-batches. What comes out is compared with what the stage ended with, to the bit. Beside it stands the
time in which all stages together ran the same steps: what a return to the checkpoint costs. Last comes what
logging fewer boundaries would save, by the measured times: bytes against recovery time.

These are wall times of processes that share the machine's cores. With fewer cores than stages the global
re-run is slower for it, and replaying workers gain nothing beyond the number of cores.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from typing import Any

from benchmarks import record
from benchmarks.replay_ranks import (
    Sent,
    Staged,
    bytes_logged,
    expect,
    forget_replayed,
    log_boundaries,
    part_of,
    replay,
    sent_to,
)
from elastic_train.config import Batch, RunSpec
from elastic_train.planner.plan import Mesh
from elastic_train.recovery.grouping import Boundaries, curve
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool, PerRank

STAGES = ((0, 3), (3, 6), (6, 8))
LINK_BYTES_S = 1e9
LIMIT_S = 600.0


def spec(steps: int) -> RunSpec:
    return RunSpec(
        name="replay",
        storage_path="unused",
        batch=Batch(global_size=16, micro_size=2),
        max_steps=steps,
        min_workers=1,
        max_workers=3,
        clip_norm=1.0,
        boundary_logs=None,
    )


def main() -> int:
    given = record.options(__doc__ or "").parse_args()
    steps, turns = (6, 2) if given.quick else (20, 5)
    pool, generations = GlooPool(3), itertools.count(1)
    try:
        results, rows = _measure(pool, generations, steps, turns)
    finally:
        pool.close()
    alone = [r for r in results if r["kind"] == "replay" and r["workers"] == 1]
    whole = statistics.median(r["seconds"] for r in results if r["kind"] == "steps" and not r["logged"])
    pairs = [
        on["seconds"] / off["seconds"]
        for off, on in itertools.pairwise(r for r in results if r["kind"] == "steps")
        if on["logged"] and not off["logged"]
    ]
    headline = {
        "x_vs_global_rerun": record.ratio(whole, record.median(r["seconds"] for r in alone)),
        "x_vs_global_rerun_slowest_stage": record.ratio(whole, max(r["seconds"] for r in alone)),
        "logging_overhead_ratio": record.median(pairs),
        **{f"speed_up_{n}_workers": _speed_up(results, n) for n in (2, 3)},
    }
    print(record.table(("kind", "stage", "workers", "logged", "seconds", "same bits"), _lines(results)))
    print("\n" + record.table(("groups", "log bytes", "mean recovery s"), rows))
    finished = record.record(
        "replay",
        results=results,
        headline=headline,
        steps=steps,
        groups=[{"groups": g, "log_bytes": b, "recovery_s": s} for g, b, s in rows],
    )
    record.finish(finished, given.json)
    return 0 if all(r["same"] for r in results if r["kind"] == "replay") else 1


def _measure(pool: GlooPool, generations: Any, steps: int, turns: int) -> tuple[list[Any], list[Any]]:
    gang = Gang(pool, generations, Staged(size="small", seq_len=32), spec(steps))
    gang._timeout = LIMIT_S
    plan = gang.plan_on(Mesh(pp=3), stages=STAGES)
    results: list[dict[str, Any]] = []
    base: list[Any] = []
    gang.form(plan)
    gang.run()  # what is made once in a process is no part of any measurement
    for logged in [False, True] * turns:
        gang.form(plan)
        if logged:
            pool.run(log_boundaries)
        base = pool.run(part_of)
        reports = gang.run()
        first = reports[1:]  # the first step of a generation opens its connections
        seconds = statistics.fmean(r.seconds for r in first) * steps
        results.append({"kind": "steps", "logged": logged, "seconds": seconds})
    edges = _edges(pool, steps)
    sent = {stage: _sent(pool, stage, steps) for stage in range(3)}
    pool.run(expect, pool.run(part_of))
    for stage, workers in ((0, 1), (2, 1), (1, 1), (1, 2), (1, 3)):
        crews: list[Any] = [None]
        if workers > 1:
            prefix = f"crew{workers}"
            crews = [(n, workers, pool.store_host, pool.store_port, prefix) for n in range(workers)]
        found = pool.run(
            replay,
            next(generations),
            plan,
            stage,
            base[stage],
            sent[stage],
            PerRank(crews),
            ranks=range(workers),
            timeout=LIMIT_S,
        )
        results.append(
            {
                "kind": "replay",
                "stage": stage,
                "workers": workers,
                "restore_s": max(f[0] for f in found),
                "seconds": max(f[1] for f in found),
                "same": all(f[2] for f in found),
            }
        )
        pool.run(forget_replayed)
    stage_s = [
        next(r["seconds"] for r in results if r.get("stage") == s and r["workers"] == 1) / steps
        for s in range(3)
    ]
    boundaries = Boundaries(machine_s=tuple(stage_s), edge_bytes=edges, interval=steps, bytes_s=LINK_BYTES_S)
    rows = [
        (" ".join(f"{a}-{b - 1}" for a, b in made.groups), made.log_bytes, made.recovery_s)
        for made in curve(boundaries)
    ]
    return results, rows


def _edges(pool: GlooPool, steps: int) -> tuple[int, ...]:
    """Bytes that cross each boundary in one step, both ways: stage 1 logs as much for 0 as it does for 2."""
    first, middle, last = (n // steps for n in pool.run(bytes_logged))
    assert middle == first + last
    return first * 2, last * 2


def _sent(pool: GlooPool, stage: int, steps: int) -> Sent:
    told = [pool.run(sent_to, stage, steps, ranks=[r])[0] for r in range(3) if r != stage]
    return Sent(tensors={c: t for tensors, _ in told for c, t in tensors.items()}, votes=told[0][1])


def _speed_up(results: list[dict[str, Any]], workers: int) -> float | None:
    took = {r["workers"]: r["seconds"] for r in results if r.get("stage") == 1}
    return record.ratio(took.get(1), took.get(workers))


def _lines(results: list[dict[str, Any]]) -> list[list[Any]]:
    return [
        [r.get(key) for key in ("kind", "stage", "workers", "logged", "seconds", "same")] for r in results
    ]


if __name__ == "__main__":
    sys.exit(main())
