"""`status` and `events`: folds of the journal, which lies in storage."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime

from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.cli.say import say, say_json, say_line
from elastic_train.cli.steer import STALE_S, WATCH_S, alive
from elastic_train.cluster.run_reading import records as records_of
from elastic_train.cluster.run_reading import summary
from elastic_train.control.events import StepCommitted
from elastic_train.errors import StorageNotFound
from elastic_train.observe.goodput import words
from elastic_train.observe.history import table as history_table
from elastic_train.observe.records import planning, to_json
from elastic_train.observe.run_progress import line
from elastic_train.observe.save_report import peers_held, saving
from elastic_train.observe.text_columns import columns
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.lease import Lease


def show_status(run: str, *, as_json: bool, watch_s: float = WATCH_S) -> None:
    """A run that is silent for long is watched for `watch_s`: it may be nobody's any more."""
    store = open_store(run)
    told = summary(store)
    if told.last is None:
        raise _nothing(run)
    config = RunDirectory(store).config() or {}
    progress, changes, records = told.progress, told.changes.all, told.telling
    cadence = saving(config, records)
    lease = Lease(store, holder="", lease_s=1.0).look()
    held = progress.ended is None and lease is not None and not lease.released
    silent = (datetime.now(UTC) - datetime.fromisoformat(records[-1].wall)).total_seconds() > STALE_S
    stale = held and silent and not alive(store, watch_s)
    if as_json:
        say_json(
            {
                "run": run,
                "phase": progress.phase,
                "step": progress.step,
                "max_steps": config.get("max_steps"),
                "loss": progress.loss,
                "saved": progress.saved,
                "cadence": cadence,
                "peer_memory": [asdict(held) for held in peers_held(records)],
                "plan": planning(records),
                "restarts": progress.restarts,
                "skipped": progress.skips,
                "ended": progress.ended,
                "last_event": records[-1].wall,
                "stale": stale,
                "holder": None if lease is None or lease.released else lease.holder,
                "losses": told.losses,
                "changes": [asdict(change) for change in changes],
            }
        )
        return
    say(line(progress, int(config.get("max_steps", 0))))
    say_line(f"last event {records[-1].wall}: {progress.reason}")
    if planned := planning(records):
        say(f"plan: {planned}")
    say(cadence)
    say(words(told.account.told()))
    if stale:
        say(f"stale since {records[-1].wall}: its controller shows no life; submit the run again to go on")
    elif held and lease is not None:
        say_line(f"held by {lease.holder}")
    if changes:
        say("\n" + columns(history_table(changes)))


def show_events(run: str, *, as_json: bool) -> None:
    found = False
    for record in records_of(open_store(run)):
        found = True
        if as_json:
            say_json(to_json(record))
        elif record.reason and (not isinstance(record.event, StepCommitted) or record.event.skipped):
            say_line(f"{record.wall[:19]}  {record.phase:9}  {record.reason}")
    if not found:
        raise _nothing(run)


def _nothing(run: str) -> StorageNotFound:
    return StorageNotFound(path=run, operation="read", problem="there is no run with a journal here.")
