"""Live display in a terminal: a run's state in three lines below its log."""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic_train.cluster.driver.run_activity import Doing, storage_failing
from elastic_train.observe.finish_forecast import forecast
from elastic_train.observe.run_summary import RunSummary
from elastic_train.observe.text_columns import plain
from elastic_train.show.scale import duration, number

STATES = {"start": "starting", "switch": "switching", "recovery": "recovering", "not running": "over"}
FIELDS = ("loss", "speed", "left", "goodput", "restarts", "saved", "on")


class Display:
    """`show` draws it anew, `say` prints a line above it, `close` takes it away."""

    def __init__(self, name: str, max_steps: int, *, console: Console | None = None) -> None:
        self._name, self._max_steps = name, max_steps
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        self._phase, self._since = "", 0.0

    def show(self, told: RunSummary, doing: Doing | None = None) -> None:
        now = time.monotonic()
        if told.progress.phase != self._phase:
            self._phase, self._since = told.progress.phase, now
        self._live.update(picture(told, self._name, self._max_steps, doing, now - self._since), refresh=True)

    def say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


def picture(
    told: RunSummary, name: str, max_steps: int, doing: Doing | None = None, seconds: float = 0.0
) -> Group:
    """A bar of steps, one of what is done `seconds` long instead of them, and the numbers that a person looks
    for.
    """
    progress = told.progress
    state = "" if progress.phase == "running" else f" {STATES.get(told.account.doing, progress.phase)}"
    bar = ProgressBar(total=max(1, max_steps), completed=progress.step)
    rows: list[RenderableType] = [
        _row(
            Text.assemble((plain(name), "bold"), (state, "yellow")),
            bar,
            f"step {progress.step:,}/{max_steps:,}",
        )
    ]
    if doing is not None:
        done = ProgressBar(total=doing.whole, completed=doing.done) if doing.whole else ""
        amount = f"{doing.amount}, {duration(seconds)}" if doing.whole else duration(seconds)
        rows.append(_row(Text(doing.words, "yellow"), done, amount))
    if failing := storage_failing(told):
        rows.append(Text(f"{failing}; what is due is saved once it is back", "yellow"))
    said = numbers(told, max_steps)
    for names in (FIELDS[:4], FIELDS[4:]):
        if fields := _field(said, *names):
            rows.append(Text("  ").join(fields))
    return Group(*rows)


def _row(head: Text, bar: RenderableType, tail: str) -> Table:
    """A line of its own width: what stands in one leaves the bars of the others where they are."""
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    row.add_row(head, bar, Text(tail))
    return row


def numbers(told: RunSummary, max_steps: int) -> dict[str, str]:
    """What is known, by its name, in words."""
    progress, group = told.progress, told.timeline.group
    found = {"restarts": str(progress.restarts)}
    if progress.loss is not None:
        found["loss"] = f"{progress.loss:.4g}" + (" (skipped)" if progress.skipped else "")
    if progress.tokens_per_s is not None:
        found["speed"] = f"{number(progress.tokens_per_s)}/s"
    ahead = forecast(told, max_steps)
    if ahead is not None and progress.step:
        found["left"] = f"{duration(ahead.expected)} ({duration(ahead.earliest)} to {duration(ahead.latest)})"
    account = told.account.told()
    if account.good_s:
        found["goodput"] = f"{account.share:.0%}"
    if group is not None:
        found["on"] = group.plan
    saved = [] if progress.saved is None else [f"{progress.saved} in storage"]
    held = [step for step, own, *_ in told.figures.held.values() if own]
    saved += [f"{min(held)} in memory"] if held else []
    if saved:
        found["saved"] = ", ".join(saved)
    return found


def _field(said: dict[str, str], *names: str) -> list[Text]:
    return [Text.assemble((f"{name} ", "dim"), plain(said[name])) for name in names if name in said]
