"""The driver's loop: shows what the controller reports, passes on a wish to stop, returns the end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import train
from ray.exceptions import GetTimeoutError, RayError

from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.cluster.chaos import Chaos
from elastic_train.cluster.controller import Update
from elastic_train.cluster.result import Result
from elastic_train.cluster.screen import Screen
from elastic_train.config import RunSpec
from elastic_train.control.commands import End
from elastic_train.control.events import Cause
from elastic_train.errors import (
    CapacityTimeout,
    ConfigError,
    InfrastructureError,
    NoCheckpoint,
    UserCodeError,
)
from elastic_train.observe.ledger import ledger
from elastic_train.observe.records import from_json
from elastic_train.storage.fsspec_store import child_url, open_store
from elastic_train.storage.journal import read_journal

ASK_S = 1.0
ANSWER_S = 20.0
GONE_S = 120.0  # how long a controller may be away before its driver gives up
GRACE_S = 2.5  # a job's stop is followed by SIGKILL after 3 s


def follow(controller: Any, spec: RunSpec, *, quiet: bool, chaos: Chaos | None) -> Result:
    """Until the run ended. The second signal, or the grace time after a SIGTERM, ends the wait at once."""
    screen = Screen(spec, quiet=quiet)
    store = open_store(child_url(spec.storage_path, spec.name))
    term, seen, heard = 0, 0, time.monotonic()
    with _signals() as wish:
        while True:
            if wish.reason and not wish.passed_on:
                wish.passed_on = True
                controller.stop.remote(wish.reason)
            if wish.overdue():
                ray.kill(controller, no_restart=True)  # its workers end themselves when their lease is over
                return _result(spec, End(outcome="stopped", detail=f"{wish.reason}, without waiting"), screen)
            try:
                update: Update = ray.get(controller.updates.remote(term, seen, ASK_S), timeout=ANSWER_S)
            except (RayError, GetTimeoutError) as error:
                if time.monotonic() - heard > GONE_S:
                    raise InfrastructureError(cause=f"the controller is gone: {error}") from error
                threading.Event().wait(0.2)
                continue
            heard, term, seen = time.monotonic(), update.term, update.next
            screen.show(update)
            if chaos is not None:
                chaos.on_update(update, controller, store)
            if update.ended is not None:
                break
    screen.close()
    ray.kill(controller, no_restart=True)
    if update.error is not None:
        raise update.error
    _raise_for(update.ended, spec)
    return _result(spec, update.ended, screen)


class _Wish:
    """A person's or the platform's wish to stop."""

    def __init__(self) -> None:
        self.reason = ""
        self.passed_on = False
        self._deadline = float("inf")

    def hear(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.reason:
            self._deadline = 0.0  # asked twice
        elif number == signal.SIGTERM:
            self._deadline = time.monotonic() + GRACE_S
        self.reason = self.reason or name

    def overdue(self) -> bool:
        return time.monotonic() > self._deadline


@contextmanager
def _signals() -> Iterator[_Wish]:
    """SIGINT and SIGTERM become a wish. Installed after ray.init, which puts its own handlers in place."""
    wish = _Wish()
    if threading.current_thread() is not threading.main_thread():
        yield wish
        return
    old = {
        number: signal.signal(number, lambda n, _: wish.hear(n)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield wish
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _raise_for(end: End, spec: RunSpec) -> None:
    cause = end.cause or Cause(kind="engine", detail=end.detail)
    match end.outcome:
        case "finished" | "stopped":
            return
        case "user_error" if cause.phase == "configuration":
            raise ConfigError(field="job", problem=cause.detail)
        case "user_error":
            raise UserCodeError(
                worker=end.worker,
                rank=cause.rank,
                node=cause.node,
                step=cause.step,
                phase=cause.phase,
                error=cause.detail,
                traceback=cause.traceback,
            )
        case "capacity":
            raise CapacityTimeout(
                needed=spec.min_workers,
                present=0,
                waited_s=spec.timing.wait_for_capacity_s,
                detail=end.detail,
            )
        case "checkpoint":
            raise NoCheckpoint(url=child_url(spec.storage_path, spec.name), problem=end.detail)
        case "infrastructure" | "fenced":
            raise InfrastructureError(cause=end.detail)


def _result(spec: RunSpec, end: End, screen: Screen) -> Result:
    url = child_url(spec.storage_path, spec.name)
    store = open_store(url)
    records = tuple(from_json(line) for _, part in read_journal(store) for line in part)
    book = ledger(records)
    metrics = (
        dict(book.kept[-1].metrics) | {"step": book.kept[-1].step, "loss": book.kept[-1].loss}
        if book.kept
        else {}
    )
    return Result(
        metrics=metrics,
        checkpoint=_checkpoint(RunDirectory(store), url),
        error=None,
        path=url,
        outcome=end.outcome,
        ledger=book,
        records=records,
        summary=screen.summary(),
    )


def _checkpoint(run: RunDirectory, url: str) -> train.Checkpoint | None:
    """The newest committed checkpoint as Ray Train knows checkpoints: a directory."""
    newest = run.newest()
    return None if newest is None else train.Checkpoint(f"{url}/{newest.path}")
