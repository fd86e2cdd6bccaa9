"""`logs`, `stop` and `save`: follow and steer a run through its storage alone."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.cli.exit_codes import INFRASTRUCTURE, OUTCOMES
from elastic_train.cli.output import say, say_json, say_line
from elastic_train.cluster.run_reading import covered
from elastic_train.errors import ConfigError, StorageError, StorageNotFound
from elastic_train.observe.event_text import place_in_page
from elastic_train.observe.journal_records import Record, from_json
from elastic_train.observe.run_summary import RunSummary
from elastic_train.observe.status_numbers import live_line
from elastic_train.observe.timeline import MINOR
from elastic_train.storage.commit_log import CommitLog
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.job_output import OutputLine, OutputReader, output_text
from elastic_train.storage.journal import read_journal
from elastic_train.storage.lease import Lease, Tenure
from elastic_train.storage.run_requests import ask_to_save, ask_to_stop
from elastic_train.storage.store import Store

POLL_S = 1.0
STALE_S = 60.0  # a journal that is silent for so long makes us look at the lease
WATCH_S = 15.0  # in which, or in the length of its lease, a controller that is alive renews it


def show_logs(
    run: str, *, follow: bool, output: bool = True, rank: int | None = None, verbose: bool = False
) -> int:
    """Print what happened, and with `follow` what happens until the run ends. The exit code is the run's.

    With `output` also what the job's own code printed, of one rank or of all, in the order of time.
    Of a long run the latest part is printed; `elastic-train events` has all of it.

    Storage that cannot be reached for a while is no end: only a record of the run's end is one.
    """
    store = open_store(run)
    max_steps = int((RunDirectory(store).config() or {}).get("max_steps", 0))
    told, part = covered(store)
    heard = time.monotonic()
    if part:
        say_line(f"(what happened before: elastic-train events {run})")
        say(live_line(told.progress, max_steps))
    reader = OutputReader(store)
    while True:
        try:
            printed = deque(_of_rank(reader.new(), rank) if output else ())
            for name, lines in read_journal(store, part):
                records = [from_json(plain) for plain in lines]
                _tell(told, records, max_steps, printed, verbose=verbose)
                part, heard = name, time.monotonic()
            if output and told.progress.ended is not None:
                printed += _of_rank(reader.new(every=True), rank)
            _print_until(printed, "~")
        except StorageNotFound:
            raise
        except StorageError as error:
            say(f"waiting for the storage: {error}")
        if not part:
            raise StorageNotFound(path=run, operation="read", problem="there is no run with a journal here.")
        if told.progress.ended is not None:
            return OUTCOMES[told.progress.ended[0]]
        if not follow:
            return 0
        if time.monotonic() - heard > STALE_S:
            if not alive(store):
                say("its controller shows no life: submit the run again to go on")
                return INFRASTRUCTURE
            heard = time.monotonic()
        threading.Event().wait(POLL_S)


def stop_run(run: str, *, wait: bool) -> int:
    """Ask the run's controller to stop at the next step boundary; with `wait`, until it did."""
    store = open_store(run)
    tenure = _running(store, run)
    ask_to_stop(store, tenure.term, "`elastic-train stop`")
    say_line(f"asked {tenure.holder} to stop")
    return show_logs(run, follow=True) if wait else 0


def save_run(run: str, *, within_s: float, as_json: bool = False) -> int:
    """Ask a run for a checkpoint at its next step and wait until it is committed."""
    store = open_store(run)
    tenure = _running(store, run)
    directory = RunDirectory(store)
    before = {commit.slot for commit in directory.commits()}
    ask_to_save(store, tenure.term)
    if not as_json:
        say_line(f"asked {tenure.holder} for a checkpoint")
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        new = [commit for commit in directory.commits() if commit.slot not in before]
        if new and as_json:
            say_json({"step": new[-1].step, "path": new[-1].path})
            return 0
        if new:
            say(f"the checkpoint of step {new[-1].step} is committed: {new[-1].path}")
            return 0
        threading.Event().wait(POLL_S)
    late = (
        f"no checkpoint was committed within {within_s:.0f} s; `elastic-train status` says what the run does"
    )
    say_json({"step": None, "path": None, "problem": late}) if as_json else say(late)
    return INFRASTRUCTURE


def alive(store: Store, watch_s: float = WATCH_S) -> bool:
    """Whether somebody renews the run's lease, by watching it: no other machine's clock is believed."""
    lease = Lease(store, holder="", lease_s=1.0)
    seen = lease.look()
    deadline = time.monotonic() + max(watch_s, seen.lease_s if seen is not None else 0.0)
    while seen is not None and not seen.released and time.monotonic() < deadline:
        threading.Event().wait(POLL_S)
        if lease.look() != seen:
            return True
    return False


def _running(store: Store, run: str) -> Tenure:
    """Who holds the run's lease, with the newest term: a late word of another names an old one. An error
    where nobody holds it.
    """
    tenure = Lease(store, holder="", lease_s=1.0).look()
    if tenure is None:
        raise StorageNotFound(path=run, operation="read", problem="there is no run here.")
    if tenure.released:
        raise ConfigError(field="RUN", problem=f"{run} is not running: nobody holds its lease.")
    return replace(tenure, term=max(tenure.term, CommitLog(store).newest_term()))


def _of_rank(lines: Iterable[OutputLine], rank: int | None) -> Iterator[OutputLine]:
    return (line for line in lines if rank is None or line.rank == rank)


def _print_until(printed: deque[OutputLine], wall: str) -> None:
    """Print what the job printed before a time."""
    while printed and printed[0].at < wall:
        say_line(output_text(printed.popleft()).expandtabs())


def _tell(
    told: RunSummary, records: list[Record], max_steps: int, printed: deque[OutputLine], *, verbose: bool
) -> None:
    """Print a part of the journal and what the job printed meanwhile, and where the run stands after it."""
    for record in records:
        _print_until(printed, record.wall)
        number = told.timeline.count
        told.add(record)
        for happening in told.timeline.since(number):
            if happening.kind not in MINOR:
                say_line(f"[{record.wall[11:19]}] {happening.clause}")
                if verbose and happening.reason:
                    say_line(f"           {happening.reason}{place_in_page(happening.entry)}")
    say(live_line(told.progress, max_steps))
