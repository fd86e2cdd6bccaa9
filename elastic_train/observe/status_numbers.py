"""The numbers of a run's status, each once: its name and value in JSON, its words in the text.

The live line of a run is made of `progress_numbers`; `elastic-train status` adds `status_numbers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastic_train.observe.goodput import words
from elastic_train.observe.journal_records import planning
from elastic_train.observe.run_progress import RunProgress
from elastic_train.observe.run_summary import RunSummary
from elastic_train.observe.save_report import peers_held, saving
from elastic_train.observe.text_columns import plain
from elastic_train.planner.plan import on_nodes


@dataclass(frozen=True, slots=True)
class Number:
    """`words` is empty where the text leaves the number out."""

    name: str
    value: Any
    words: str = ""


def progress_numbers(progress: RunProgress, max_steps: int | None) -> tuple[Number, ...]:
    """Where a run stands, in the order of the live line."""
    loss, speed, dp, nodes = progress.loss, progress.tokens_per_s, progress.dp, progress.nodes
    skipped, saved, restarts = progress.skips, progress.saved, progress.restarts
    on = f"dp {dp} {on_nodes(nodes)}" if dp else ""
    last_skipped = " (skipped)" if progress.skipped else ""
    return (
        Number("step", progress.step, f"step {progress.step}/{max_steps or 0}"),
        Number("max_steps", max_steps),
        Number("loss", loss, "" if loss is None else f"loss {loss:.3g}{last_skipped}"),
        Number("tokens_per_s", speed, "" if speed is None else f"{_count(speed)} tok/s"),
        Number("dp", dp, on),
        Number("nodes", nodes),
        Number("skipped", skipped, f"skipped {skipped}" if skipped else ""),
        Number("saved", saved, "" if saved is None else f"saved {saved}"),
        Number("restarts", restarts, f"restarts {restarts}"),
        Number("phase", progress.phase, progress.phase if progress.phase != "running" else ""),
    )


def status_numbers(told: RunSummary, config: Mapping[str, Any]) -> tuple[Number, ...]:
    """What else a run's journal and its configuration say, a line of text each. `told` has a last record."""
    records = told.telling
    last, account = records[-1].wall, told.account.told()
    plan, cadence = planning(records), saving(config, records)
    switch = told.costs.switch
    costs = {
        "steps": {mesh: asdict(pace) for mesh, pace in told.costs.paces.items()},
        "switch": None if switch is None else asdict(switch),
    }
    _, trouble = told.timeline.troubled or (0.0, None)
    return (
        Number("last_event", last, f"last event {last}: {plain(told.progress.reason)}"),
        Number("plan", plan, f"plan: {plan}" if plan else ""),
        Number("costs", costs, f"costs: {told.costs.words}" if told.costs.words else ""),
        Number("cadence", cadence, cadence),
        Number("storage_trouble", trouble, f"storage fails: {plain(trouble)}" if trouble else ""),
        Number("goodput", asdict(account), words(account)),
        Number("peer_memory", [asdict(held) for held in peers_held(records)]),
        Number("ended", told.progress.ended),
        Number("losses", told.losses),
        Number("changes", [asdict(change) for change in told.changes.all]),
    )


def as_json(numbers: Sequence[Number]) -> dict[str, Any]:
    return {number.name: number.value for number in numbers}


def live_line(progress: RunProgress, max_steps: int | None) -> str:
    """The progress in one line of text."""
    return "  ".join(number.words for number in progress_numbers(progress, max_steps) if number.words)


def _count(number: float) -> str:
    """A number with at most three digits before a unit: 12.3k."""
    units = ["G", "M", "k", ""]
    while number >= 1000 and len(units) > 1:
        number /= 1000
        units.pop()
    return f"{number:.3g}{units[-1]}" if number < 1000 else f"{number:.0f}{units[-1]}"
