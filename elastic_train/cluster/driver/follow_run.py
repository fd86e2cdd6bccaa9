"""The driver's loop: show what the controller reports, pass on stop requests, return the result."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.cluster.actor_names import run_key
from elastic_train.cluster.driver.callbacks import Callbacks
from elastic_train.cluster.driver.head_watch import HeadWatch
from elastic_train.cluster.driver.live_page import LivePage
from elastic_train.cluster.driver.ray_checkpoints import RayCheckpoints
from elastic_train.cluster.driver.result import Result
from elastic_train.cluster.driver.takeover import put_back
from elastic_train.cluster.driver.terminal import Screen
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.cluster.run_reading import covered, records
from elastic_train.cluster.run_updates import RunUpdate
from elastic_train.config import Prints, RunSpec
from elastic_train.control.commands import End
from elastic_train.control.events import Cause
from elastic_train.control.not_finite import NOT_FINITE
from elastic_train.errors import (
    CapacityTimeout,
    ConfigError,
    InfrastructureError,
    NoCheckpoint,
    NotFinite,
    UserCodeError,
)
from elastic_train.storage.fsspec_store import child_url, open_store
from elastic_train.storage.job_output import OutputReader

ASK_S = 1.0
GONE_S = 120.0  # how long a controller may be away before its driver gives up
AT_ONCE_S = 0.6  # how long a controller may take to end the run without a checkpoint
LEAVE_S = 0.3  # what this process needs for its own end
HEEDED = (signal.SIGINT, signal.SIGTERM)


def follow(
    controller: Any,
    spec: RunSpec,
    *,
    quiet: bool,
    verbose: bool,
    prints: Prints,
    grace_s: float,
    head: HeadWatch,
    chaos: Chaos | None,
    callbacks: Callbacks,
    live: LivePage | None = None,
) -> Result:
    """Until the run ended.

    A first signal stops it at the next step boundary with a checkpoint. A second one, or the end of the
    `grace_s` after which a SIGTERM is followed by SIGKILL, stops it where it is. Call within
    `signals_restored`.
    """
    store = open_store(child_url(spec.storage_path, spec.name))
    screen = Screen(spec, OutputReader(store, only_new=True), quiet=quiet, verbose=verbose, prints=prints)
    term, seen, heard = 0, 0, time.monotonic()
    with _signals(max(0.0, grace_s - AT_ONCE_S - LEAVE_S)) as request:
        while True:
            if request.to_pass_on():
                controller.stop.remote(request.reason, patient=not request.hurries)
            if request.overdue():
                ray.kill(controller, no_restart=True)
                put_back(run_key(spec.storage_path, spec.name), spec)
                return _result(
                    spec, End(outcome="stopped", detail=f"{request.reason}, without waiting"), screen
                )
            try:
                wait_s = AT_ONCE_S / 4 if request.reason else ASK_S
                update: RunUpdate = ray.get(
                    controller.updates.remote(term, seen, wait_s), timeout=head.answer_s
                )
            except (RayError, GetTimeoutError) as error:
                head.check()
                if time.monotonic() - heard > GONE_S:
                    ray.kill(controller, no_restart=True)
                    put_back(run_key(spec.storage_path, spec.name), spec)
                    raise InfrastructureError(cause=f"the controller is gone: {error}") from error
                threading.Event().wait(0.2)
                continue
            head.heard()
            heard, term, seen = time.monotonic(), update.term, update.next
            screen.show(update)
            callbacks.hear(update.records)
            if live is not None:
                live.hear(update)
            if chaos is not None:
                chaos.on_update(update, controller, store)
            if update.ended is not None:
                break
    screen.close()
    ray.kill(controller, no_restart=True)
    callbacks.ended(update.ended, update.error)
    if update.error is not None:
        raise update.error
    _raise_for(update.ended, spec)
    return _result(spec, update.ended, screen)


class _Request:
    """A person's or the platform's request to stop; said twice, at once."""

    def __init__(self, grace_s: float) -> None:
        self.reason = ""
        self.done = False  # how the run ended is final
        self._grace_s = grace_s
        self._said = 0
        self._at_once = self._over = float("inf")

    def hear(self, number: int) -> None:
        if self.done:  # it comes too late; the next one ends whatever holds this process up
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            return
        now = time.monotonic()
        if self.reason:
            self._at_once = min(self._at_once, now)
        elif number == signal.SIGTERM:
            self._at_once = now + self._grace_s
        self.reason = self.reason or signal.Signals(number).name

    def to_pass_on(self) -> bool:
        """Whether the controller has to be told, once for each stage."""
        now = time.monotonic()
        stage = 0 if not self.reason else 2 if now >= self._at_once else 1
        if stage <= self._said:
            return False
        self._said = stage
        if stage == 2:
            self._over = now + AT_ONCE_S
        return True

    @property
    def hurries(self) -> bool:
        """Whether the last that was passed on was said for the second time."""
        return self._said == 2

    def overdue(self) -> bool:
        return time.monotonic() > self._over


@contextmanager
def _signals(grace_s: float) -> Iterator[_Request]:
    """SIGINT and SIGTERM become a request. Installed after ray.init, which puts its own handlers in place."""
    request = _Request(grace_s)
    if _hears_signals():
        for number in HEEDED:
            signal.signal(number, lambda n, _: request.hear(n))
    try:
        yield request
    finally:
        request.done = True


@contextmanager
def signals_restored() -> Iterator[None]:
    """Who handled signals before a run handles them again once its cluster is left: a run that ended is not
    interrupted any more.
    """
    old = {number: signal.getsignal(number) for number in HEEDED} if _hears_signals() else {}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _hears_signals() -> bool:
    return threading.current_thread() is threading.main_thread()


def _raise_for(end: End, spec: RunSpec) -> None:
    cause = end.cause or Cause(kind="engine", detail=end.detail)
    match end.outcome:
        case "finished" | "stopped":
            return
        case "user_error" if cause.phase == "configuration":
            raise ConfigError(field="job", problem=cause.detail)
        case "user_error":
            kind = NotFinite if cause.phase == NOT_FINITE else UserCodeError
            raise kind(
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
    told, after = covered(store)
    rest = tuple(records(store, after))
    for record in rest:
        told.add(record)
    newest = max(told.losses, default=None)
    metrics = {} if newest is None else told.metrics | {"step": newest, "loss": told.losses[newest]}
    checkpoints = RayCheckpoints(url)
    kept = checkpoints.kept(RunDirectory(store))
    result = Result(
        metrics=metrics,
        checkpoint=kept[-1][0] if kept else None,
        error=None,
        path=url,
        best_checkpoints=kept,
        _storage_filesystem=checkpoints.system,
        outcome=end.outcome,
        summary=screen.summary(),
    )
    if not after:  # a short run: all of it at once, since its storage may be gone later
        result.records = rest
    return result
