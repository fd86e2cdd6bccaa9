"""`status` and `events`: read a run's state and history from the journal in its storage."""

from __future__ import annotations

from datetime import UTC, datetime

from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.cli.logs_stop_save import STALE_S, WATCH_S, alive
from elastic_train.cli.output import say, say_json, say_line
from elastic_train.cluster.run_reading import records as records_of
from elastic_train.cluster.run_reading import summary
from elastic_train.control.events import StepCommitted
from elastic_train.errors import StorageNotFound
from elastic_train.observe.event_text import place_in_page
from elastic_train.observe.journal_records import to_json
from elastic_train.observe.reconfigurations import table as history_table
from elastic_train.observe.run_summary import RunSummary
from elastic_train.observe.status_numbers import Number, live_line, progress_numbers, status_numbers
from elastic_train.observe.status_numbers import as_json as json_of
from elastic_train.observe.text_columns import columns, plain
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.lease import Lease
from elastic_train.storage.store import Store


def show_status(run: str, *, as_json: bool, watch_s: float = WATCH_S) -> None:
    """A run that is silent for long is watched for `watch_s`: it may be nobody's any more."""
    store = open_store(run)
    told = summary(store)
    if told.last is None:
        raise _nothing(run)
    config = RunDirectory(store).config() or {}
    standing = progress_numbers(told.progress, config.get("max_steps"))
    rest = (*status_numbers(told, config), *_holder(store, told, watch_s))
    if as_json:
        say_json({"run": run} | json_of((*standing, *rest)))
        return
    say(live_line(told.progress, config.get("max_steps")))
    for number in rest:
        if number.words:
            say(number.words)
    if changes := told.changes.all:
        say("\n" + columns(history_table(changes)))


def _holder(store: Store, told: RunSummary, watch_s: float) -> tuple[Number, ...]:
    """Who holds the run, and whether that is believed."""
    last = told.telling[-1].wall
    lease = Lease(store, holder="", lease_s=1.0).look()
    holder = None if lease is None or lease.released else lease.holder
    held = told.progress.ended is None and holder is not None
    apart_s = (datetime.now(UTC) - datetime.fromisoformat(last)).total_seconds()
    silent = abs(apart_s) > STALE_S  # a time that is to come is another clock's: it says nothing, either
    stale = held and silent and not alive(store, watch_s)
    dead = f"stale since {last}: its controller shows no life; submit the run again to go on"
    return (
        Number("stale", stale, dead if stale else ""),
        Number("holder", holder, f"held by {plain(holder or '')}" if held and not stale else ""),
    )


def show_events(run: str, *, as_json: bool) -> None:
    found = False
    for record in records_of(open_store(run)):
        found = True
        if as_json:
            say_json(to_json(record))
        elif record.reason and (not isinstance(record.event, StepCommitted) or record.event.skipped):
            said = f"{record.reason}{place_in_page(record.entry)}"
            say_line(f"{record.wall[:19]}  {record.phase:9}  {said}")
    if not found:
        raise _nothing(run)


def _nothing(run: str) -> StorageNotFound:
    return StorageNotFound(path=run, operation="read", problem="there is no run with a journal here.")
