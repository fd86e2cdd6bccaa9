"""The metrics of a run: names, kinds and units by Prometheus' conventions, each a function of its summary.

So they can be had of any run, past or present, from its journal alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from elastic_train.observe.finish_forecast import forecast
from elastic_train.observe.run_summary import RunSummary

Labels = tuple[str, ...]
Samples = Iterable[tuple[Labels, float]]
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """`labels` are the names of what each sample's labels are; that of the run itself is not among them.

    A summary's samples are quantiles, and then `count` and `sum`.
    """

    name: str
    kind: Literal["gauge", "counter", "summary"]
    help: str
    of: Callable[[RunSummary, int], Samples]  # the summary, and how many steps the run is to take
    labels: Labels = ()


def samples(metric: Metric, told: RunSummary, max_steps: int) -> list[tuple[Labels, float]]:
    """What is known of a metric now, maybe nothing."""
    return list(metric.of(told, max_steps))


def _one(value: Callable[[RunSummary], float | int | None]) -> Callable[[RunSummary, int], Samples]:
    def of(told: RunSummary, _: int) -> Samples:
        found = value(told)
        return () if found is None else (((), float(found)),)

    return of


def _by(
    value: Callable[[RunSummary], dict[str, float] | dict[str, int]],
) -> Callable[[RunSummary, int], Samples]:
    def of(told: RunSummary, _: int) -> Samples:
        return [((key,), float(number)) for key, number in sorted(value(told).items())]

    return of


def _step_times(told: RunSummary, _: int) -> Iterator[tuple[Labels, float]]:
    times = told.figures.step_times
    for share in QUANTILES if times.count else ():
        yield (str(share),), times.quantile(share) or 0.0
    yield ("count",), float(times.count)
    yield ("sum",), times.total


def _eta(told: RunSummary, max_steps: int) -> Samples:
    found = forecast(told, max_steps) if max_steps else None
    if found is None:
        return ()
    return [(("earliest",), found.earliest), (("expected",), found.expected), (("latest",), found.latest)]


def _plan(told: RunSummary, _: int) -> Samples:
    group = told.timeline.group
    return () if group is None else (((group.mesh,), 1.0),)


def _mtti(told: RunSummary) -> float | None:
    number, trained = told.figures.interruptions, told.account
    return (trained.good_s + trained.again_s) / number if number else None


def _nodes(told: RunSummary) -> dict[str, int]:
    statuses = [lane.stretches[-1].status for lane in told.timeline.lanes if lane.there]
    return {status: statuses.count(status) for status in ("training", "standby", "leaving")}


def _held(told: RunSummary) -> dict[str, int]:
    return dict(told.figures.held_bytes())


def _badput(told: RunSummary) -> dict[str, float]:
    return {cause.replace(" ", "_"): spent for cause, spent in told.account.told().badput}


PREFIX = "elastic_train_"
METRICS = (
    Metric(
        name="step",
        kind="gauge",
        help="Newest step that is kept.",
        of=_one(lambda t: t.progress.step),
    ),
    Metric(
        name="max_steps",
        kind="gauge",
        help="Steps that the run is to take.",
        of=lambda _, most: (((), float(most)),) if most else (),
    ),
    Metric(name="loss", kind="gauge", help="Loss of the newest step.", of=_one(lambda t: t.progress.loss)),
    Metric(
        name="learning_rate",
        kind="gauge",
        help="Learning rate of each parameter group in the newest step.",
        labels=("group",),
        of=lambda t, _: [((str(n),), rate) for n, rate in enumerate(t.figures.rates)],
    ),
    Metric(
        name="tokens_per_second",
        kind="gauge",
        help="What the task counts, tokens or samples, per second of the newest steps.",
        of=_one(lambda t: t.progress.tokens_per_s),
    ),
    Metric(
        name="tokens_total",
        kind="counter",
        help="What the task counts, over all executions of steps.",
        of=_one(lambda t: t.figures.tokens),
    ),
    Metric(
        name="step_seconds",
        kind="summary",
        help="Seconds from one vote to the next, over all executions of steps.",
        labels=("quantile",),
        of=_step_times,
    ),
    Metric(
        name="steps_executed_total",
        kind="counter",
        help="Executions of steps, those that were run again included.",
        of=_one(lambda t: t.figures.executions),
    ),
    Metric(
        name="steps_lost_total",
        kind="counter",
        help="Committed steps that a later group had to run again.",
        of=_one(lambda t: t.figures.lost),
    ),
    Metric(
        name="steps_skipped_total",
        kind="counter",
        help="Executions of steps that were skipped, because loss or gradient was not finite.",
        of=_one(lambda t: t.figures.skipped),
    ),
    Metric(
        name="wall_seconds",
        kind="gauge",
        help="Seconds from the first record of the run to its newest.",
        of=_one(lambda t: t.account.told().wall_s),
    ),
    Metric(
        name="productive_seconds",
        kind="gauge",
        help="Seconds of first executions of steps that are kept. A rollback takes some away.",
        of=_one(lambda t: t.account.good_s),
    ),
    Metric(
        name="goodput_ratio",
        kind="gauge",
        help="Productive seconds by wall seconds.",
        of=_one(lambda t: t.account.told().share),
    ),
    Metric(
        name="badput_seconds",
        kind="gauge",
        help="All other seconds by cause: with the productive ones they are the wall seconds.",
        labels=("cause",),
        of=_by(_badput),
    ),
    Metric(
        name="restarts_total",
        kind="counter",
        help="Reconfigurations that are over, by cause: those that were asked for included.",
        labels=("cause",),
        of=_by(lambda t: t.figures.restarts),
    ),
    Metric(
        name="interruptions_total",
        kind="counter",
        help="Reconfigurations that nobody asked for.",
        of=_one(lambda t: t.figures.interruptions),
    ),
    Metric(
        name="recovery_seconds_total",
        kind="counter",
        help="Seconds of recoveries from interruptions by phase: settle, wait, form, first step.",
        labels=("phase",),
        of=_by(lambda t: {k.replace(" ", "_"): v for k, v in t.figures.recovery.items()}),
    ),
    Metric(
        name="mttr_seconds",
        kind="gauge",
        help="Mean time to recover from an interruption by phase.",
        labels=("phase",),
        of=_by(lambda t: {k.replace(" ", "_"): v for k, v in t.figures.mttr_s.items()}),
    ),
    Metric(
        name="mtti_seconds",
        kind="gauge",
        help="Mean seconds of training from one interruption to the next.",
        of=_one(_mtti),
    ),
    Metric(
        name="world_size",
        kind="gauge",
        help="Workers of the newest group.",
        of=_one(lambda t: len(t.timeline.group.workers) if t.timeline.group is not None else 0),
    ),
    Metric(
        name="nodes",
        kind="gauge",
        help="Nodes that are there, by what they do: training, standby, leaving.",
        labels=("status",),
        of=_by(_nodes),
    ),
    Metric(
        name="plan_info",
        kind="gauge",
        help="1 for the plan of the newest group.",
        labels=("plan",),
        of=_plan,
    ),
    Metric(
        name="checkpoints_total",
        kind="counter",
        help="Checkpoints committed to storage.",
        of=_one(lambda t: t.figures.checkpoints),
    ),
    Metric(
        name="checkpoint_failures_total",
        kind="counter",
        help="Parts of checkpoints, or commits, that storage did not take.",
        of=_one(lambda t: t.figures.failed_saves),
    ),
    Metric(
        name="checkpoint_step",
        kind="gauge",
        help="Step of the newest committed checkpoint.",
        of=_one(lambda t: t.progress.saved),
    ),
    Metric(
        name="checkpoint_written_bytes_total",
        kind="counter",
        help="Bytes of checkpoints written to storage.",
        of=_one(lambda t: t.figures.written),
    ),
    Metric(
        name="checkpoint_write_seconds_total",
        kind="counter",
        help="Seconds of the slowest rank's write, over committed checkpoints. Training goes on meanwhile.",
        of=_one(lambda t: t.figures.write_s.total),
    ),
    Metric(
        name="save_stall_seconds_total",
        kind="counter",
        help="By how much steps took longer than the median while a checkpoint was on its way.",
        of=_one(lambda t: t.figures.stall_s),
    ),
    Metric(
        name="snapshot_bytes",
        kind="gauge",
        help="Bytes in peer memory: of nodes' own workers, copies for other nodes, spilled to disk.",
        labels=("kind",),
        of=_by(_held),
    ),
    Metric(
        name="restored_bytes_total",
        kind="counter",
        help="Bytes of state taken from memory by new groups: of the rank's own node, of other nodes.",
        labels=("tier",),
        of=_by(lambda t: {"own_node": t.figures.near_bytes, "other_nodes": t.figures.far_bytes}),
    ),
    Metric(
        name="storage_trouble",
        kind="gauge",
        help="1 while storage does not take what it is given.",
        of=_one(lambda t: bool(t.timeline.trouble) and t.timeline.trouble[-1][1] < 0),
    ),
    Metric(
        name="eta_seconds",
        kind="gauge",
        help="Seconds to the last step: earliest without an interruption, expected, latest.",
        labels=("bound",),
        of=_eta,
    ),
)
