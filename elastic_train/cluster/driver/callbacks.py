"""Ray Train's `UserCallback`s: the driver calls them after each committed step and for an error of the job.

A step is reported at least once; a callback that raises is isolated and counted, the run goes on. One that
has a method `after_records` is given the journal's records as they come, all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ray import train
from ray.train import RunConfig, ScalingConfig, UserCallback

from elastic_train.cluster.driver.ray_checkpoints import RayCheckpoints
from elastic_train.cluster.ray_train_private import train_context
from elastic_train.config import RunSpec
from elastic_train.control.commands import End
from elastic_train.control.events import CheckpointCommitted, StepCommitted
from elastic_train.errors import ElasticTrainError
from elastic_train.observe.journal_records import Record
from elastic_train.storage.fsspec_store import child_url

log = logging.getLogger(__name__)
KEPT = 64  # steps whose metrics wait for their checkpoint


class Callbacks:
    """`after_report` gets a step's metrics, or a committed checkpoint with the metrics of its step."""

    def __init__(self, callbacks: Sequence[Any], spec: RunSpec) -> None:
        self._all = tuple(callback for callback in callbacks if isinstance(callback, UserCallback))
        self._checkpoints = RayCheckpoints(child_url(spec.storage_path, spec.name))
        self._context = train_context(
            RunConfig(name=spec.name, storage_path=spec.storage_path),
            ScalingConfig(num_workers=(spec.min_workers, spec.max_workers)),
        )
        self._metrics: dict[int, dict[str, Any]] = {}
        self.failures = 0

    def hear(self, records: Sequence[Record]) -> None:
        for callback in self._all:
            hears = getattr(callback, "after_records", None)
            if records and hears is not None:
                self._guarded(lambda hears=hears: hears(records))
        for record in records if self._all else ():
            match record.event:
                case StepCommitted() as event:
                    metrics = {"loss": event.loss, **dict(event.metrics), "step": event.step}
                    known = self._metrics.pop(event.step, {}) | metrics  # told again, a step has more to say
                    self._metrics = dict([*self._metrics.items(), (event.step, known)][-KEPT:])
                    self._report(metrics, None)
                case CheckpointCommitted(stored=stored):
                    metrics = self._metrics.get(stored.step, {"step": stored.step})
                    self._report(metrics, self._checkpoints.at(stored.path))
                case _:
                    pass

    def ended(self, end: End, error: ElasticTrainError | None) -> None:
        """Tell an error of the job's own code."""
        if end.outcome != "user_error":
            return
        cause = error or RuntimeError(end.detail)
        rank = end.cause.rank if end.cause is not None else 0
        for callback in self._all:
            self._guarded(lambda c=callback: c.after_exception(self._context, {rank: cause}))

    def _report(self, metrics: dict[str, Any], checkpoint: train.Checkpoint | None) -> None:
        for callback in self._all:
            self._guarded(lambda c=callback: c.after_report(self._context, [dict(metrics)], checkpoint))

    def _guarded(self, call: Any) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a person's callback never ends a run
            self.failures += 1
            log.warning("a callback failed, for the %d. time: %r", self.failures, error)
