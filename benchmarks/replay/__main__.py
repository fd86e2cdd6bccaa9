"""How much sooner is a lost stage back when it alone is replayed, and what does its log cost?

python -m benchmarks.replay [--quick] [--json FILE]

A pipeline of three stages (Llama of 8 layers, AdamW, clipped) trains in three processes.

- logging overhead: the log is kept in blocks of five steps, and not kept in as many, in turns in one run, now
  the one first and now the other. Of each pair of blocks the ratio of their time, from the first update of a
  block to its last; the median of the pairs with its 95 % interval, by the clock, and by the processor time
  of all three processes, which others on the machine disturb less.
- replay: checkpoint, 40 steps, and then each stage is restored as it began and run again from its neighbours'
  logs, by one process, by two and by three, which share the micro-batches. By one it has to come out equal to
  the bit, by more within rounding.
- global re-run: the same steps by all stages, which is what a return to the checkpoint costs. In wall time,
  and in compute: seconds of processors, in which machines of any number compare.
- selective logging: for each choice of boundaries that a budget of bytes can buy, the bytes of the log
  against the mean recovery, predicted from the measured stages and measured by replaying each group.

The processes share the machine's cores: with fewer cores than stages the global re-run is slower in wall
time, and workers beyond the number of cores gain nothing.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import record
from benchmarks.paired import middle
from benchmarks.replay.ranks import (
    Base,
    Sent,
    Staged,
    Timed,
    count_processors,
    end_of,
    expect,
    log_in_turns,
    logs,
    marks,
    part_of,
    processors,
    replay,
    sent_to,
)
from elastic_train.config import Batch, RunSpec
from elastic_train.planner.plan import Mesh, Plan
from elastic_train.recovery.boundary_groups import Boundaries, Logging, curve
from elastic_train.recovery.substitute_plan import substitute
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool, PerRank
from elastic_train.train.rank_assignment import ReplayAssignment

STAGES = ((0, 3), (3, 6), (6, 8))
BLOCK = 5  # steps with the log, then as many without
LINK_BYTES_S = 1e9
LIMIT_S = 300.0
CLOSE = 1e-3
"""What two orders of summation in fp32 may differ by at the end, relative to a tensor's largest value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    pairs: int  # of blocks
    steps: int  # since the checkpoint
    repetitions: int


FULL, QUICK = Size(pairs=24, steps=40, repetitions=3), Size(pairs=6, steps=6, repetitions=1)


class Bench:
    """The three processes, and what was measured in them."""

    def __init__(self, pool: GlooPool, size: Size) -> None:
        self._pool, self._size = pool, size
        self.results: list[dict[str, Any]] = []

    def run(self) -> Sequence[tuple[Logging, float]]:
        """The curve of selective logging: choices, and the seconds that were measured for each."""
        print("steps with the log and without", flush=True)
        self._overhead()
        print("the steps since a checkpoint", flush=True)
        plan, bases, sent = self._train()
        for _ in range(self._size.repetitions):
            for stage, workers in ((0, 1), (1, 1), (2, 1), (1, 2), (1, 3)):
                print(f"stage {stage} by {workers}", flush=True)
                self._replay(plan, (stage, stage + 1), workers, bases, sent)
        return self._selective(plan, bases, sent)

    def seconds(self, stages: tuple[int, int], workers: int, kind: str = "seconds") -> float:
        """The median of a replay."""
        return statistics.median(
            r[kind]
            for r in self.results
            if r["kind"] == "replay" and (r["stages"], r["workers"]) == (list(stages), workers)
        )

    def _gang(self, steps: int) -> Gang:
        spec = RunSpec(
            name="replay",
            storage_path="unused",
            batch=Batch(global_size=16, micro_size=2),
            max_steps=steps,
            min_workers=1,
            max_workers=3,
            clip_norm=1.0,
        )
        gang = Gang(self._pool, Staged(size="small", seq_len=32), spec)
        gang._timeout = LIMIT_S
        return gang

    def _overhead(self) -> None:
        gang = self._gang((2 * self._size.pairs + 1) * BLOCK)
        gang.form(gang.plan_on(Mesh(pp=3), stages=STAGES))
        self._pool.run(log_in_turns, BLOCK)
        gang.run()
        of_ranks = self._pool.run(marks)
        for first in range(1, 2 * self._size.pairs, 2):  # block 0 makes what is made once in a process
            took = {logs(number): _block(of_ranks, number) for number in (first, first + 1)}
            (off, off_cpu), (on, on_cpu) = took[False], took[True]
            self.results.append(
                {
                    "kind": "logging",
                    "without_s": off,
                    "with_s": on,
                    "ratio": on / off,
                    "processor_ratio": on_cpu / off_cpu,
                }
            )

    def _train(self) -> tuple[Plan, list[Base], Sent]:
        """The steps since a checkpoint, with the log; each stage's state there, and what was kept."""
        steps = self._size.steps
        gang = self._gang(steps)
        plan = gang.plan_on(Mesh(pp=3), stages=STAGES)
        gang.form(plan)
        bases: list[Base] = self._pool.run(part_of)
        self._pool.run(count_processors)
        reports = gang.run()
        wall = statistics.fmean(r.seconds for r in reports[1:]) * steps  # the first one opens connections
        self.results.append(
            {"kind": "steps", "seconds": wall, "processor_s": sum(self._pool.run(processors)), "steps": steps}
        )
        reported = [self._pool.run(sent_to, steps, ranks=[r])[0] for r in range(3)]
        sent = Sent(
            tensors={c: t for tensors, _ in reported for c, t in tensors.items()}, votes=reported[0][1]
        )
        self._pool.run(expect, self._pool.run(end_of))
        return plan, bases, sent

    def _replay(
        self, plan: Plan, stages: tuple[int, int], workers: int, bases: Sequence[Base], sent: Sent
    ) -> Timed:
        names = [str(n) for n in range(workers)]
        stood_in = substitute(plan, stages, names, exact=False)
        assert stood_in is not None
        during = next(self._pool.generations)
        assignments = [
            ReplayAssignment(
                generation=during,
                during=during,
                substitute=stood_in,
                number=number,
                ranks=tuple(range(*stages)),
                store_host=self._pool.store_host,
                store_port=self._pool.store_port,
                address="127.0.0.1",
            )
            for number in range(workers)
        ]
        found: list[Timed] = self._pool.run(
            replay,
            PerRank(assignments),
            bases[slice(*stages)],
            sent.received_by(stages),
            ranks=range(workers),
            timeout=LIMIT_S,
        )
        slowest = max(found, key=lambda f: f.seconds)
        self.results.append(
            {
                "kind": "replay",
                "stages": list(stages),
                "workers": workers,
                "restore_s": max(f.restore_s for f in found),
                "seconds": slowest.seconds,
                "processor_s": sum(f.processor_s for f in found),
                "off_by": max(f.off_by for f in found),
            }
        )
        return slowest

    def _selective(self, plan: Plan, bases: Sequence[Base], sent: Sent) -> Sequence[tuple[Logging, float]]:
        steps = self._size.steps
        boundaries = Boundaries(
            machine_s=tuple(self.seconds((s, s + 1), 1) / steps for s in range(3)),
            edge_bytes=tuple(sent.crossing(s, s + 1) // steps for s in range(2)),
            interval=steps,
            bytes_s=LINK_BYTES_S,
        )
        choices = curve(boundaries)
        for group in sorted({g for choice in choices for g in choice.groups if g[1] - g[0] > 1}):
            self._replay(plan, group, 1, bases, sent)
        # A failure strikes each machine alike, half-way between two checkpoints in the mean.
        means = [
            sum((stop - start) / 3 * self.seconds((start, stop), 1) / 2 for start, stop in choice.groups)
            for choice in choices
        ]
        return list(zip(choices, means, strict=True))


def headline(bench: Bench) -> dict[str, float | None]:
    (whole,) = [r for r in bench.results if r["kind"] == "steps"]
    pairs = [r for r in bench.results if r["kind"] == "logging"]
    clock, processor = (middle([r[kind] for r in pairs]) for kind in ("ratio", "processor_ratio"))
    singles = [(stage, stage + 1) for stage in range(3)]
    wall = [bench.seconds(stages, 1) for stages in singles]
    compute = [bench.seconds(stages, 1, "processor_s") for stages in singles]
    shared = {workers: bench.seconds((1, 2), workers) for workers in (1, 2, 3)}
    return {
        "x_vs_global_rerun": record.ratio(whole["seconds"], statistics.fmean(wall)),
        "x_vs_global_rerun_slowest_stage": record.ratio(whole["seconds"], max(wall)),
        "x_vs_global_rerun_compute": record.ratio(whole["processor_s"], statistics.fmean(compute)),
        **{f"x_vs_global_rerun_{n}_workers": record.ratio(whole["seconds"], shared[n]) for n in (2, 3)},
        **{f"speed_up_{n}_workers": record.ratio(shared[1], shared[n]) for n in (2, 3)},
        "logging_overhead_ratio": clock.median,
        "logging_overhead_ratio_low": clock.low,
        "logging_overhead_ratio_high": clock.high,
        "logging_overhead_ratio_processor": processor.median,
        "logging_overhead_ratio_processor_low": processor.low,
        "logging_overhead_ratio_processor_high": processor.high,
    }


def _block(of_ranks: Sequence[list[tuple[float, float]]], number: int) -> tuple[float, float]:
    """Seconds by the clock of the first rank, and of all ranks' processors, from first to last update."""
    first, last = number * BLOCK, (number + 1) * BLOCK - 1
    (began, _), (ended, _) = of_ranks[0][first], of_ranks[0][last]
    return ended - began, sum(marks[last][1] - marks[first][1] for marks in of_ranks)


def main() -> int:
    given = record.options(__doc__ or "").parse_args()
    pool = GlooPool(3)
    try:
        bench = Bench(pool, QUICK if given.quick else FULL)
        chosen = bench.run()
    finally:
        pool.close()
    replays = [r for r in bench.results if r["kind"] == "replay"]
    columns = ("stages", "workers", "restore_s", "seconds", "processor_s", "off_by")
    print(record.table([c.replace("_", " ") for c in columns], [[r[c] for c in columns] for r in replays]))
    rows = [
        (" ".join(f"{a}-{b - 1}" for a, b in made.groups), made.log_bytes, made.recovery_s, mean)
        for made, mean in chosen
    ]
    header = ("groups", "log bytes", "predicted mean recovery s", "measured mean recovery s")
    print("\n" + record.table(header, rows))
    finished = record.record(
        "replay",
        results=bench.results,
        headline=headline(bench),
        groups=[
            dict(zip(("groups", "log_bytes", "predicted_s", "measured_s"), r, strict=True)) for r in rows
        ],
    )
    record.finish(finished, given.json)
    exact = all(r["off_by"] == 0.0 for r in replays if r["workers"] == 1 and len(range(*r["stages"])) == 1)
    return 0 if exact and all(r["off_by"] <= CLOSE for r in replays) else 1


if __name__ == "__main__":
    sys.exit(main())
