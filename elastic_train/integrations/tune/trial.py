"""One trial of a search: a process beside the head that drives a run, whose workers are where there is room.

A result of the trial is a committed step. Where a node is lost the run goes on, and the trial hears of
nothing; where the trial is stopped, its run is stopped with it, and leaves no process.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ray import tune
from ray.train import UserCallback
from ray.tune.result import RESULT_DUPLICATE

from elastic_train.api import ElasticTrainer
from elastic_train.cluster.driver.launch import absolute
from elastic_train.cluster.driver.stop_run import ask_to_stop
from elastic_train.errors import ConfigError
from elastic_train.storage.urls import parse

BESIDE_THE_HEAD: Mapping[str, float] = {"node:__internal_head__": 0.001}
"""What a trial's own process takes: it is where the search is, and no worker's node."""
CHECKPOINT = "checkpoint_url"
ASK_S = 0.5


def trainable(
    trainer: Callable[[dict[str, Any]], ElasticTrainer], *, metric: str | None = None
) -> type[tune.Trainable]:
    """What `ray.tune.Tuner` takes: `trainer(config)` makes the trainer of a trial.

    A trial is a run of its own, named by its trainer and the trial, so that it goes on where it was when its
    process is started again. Each committed step is a result: `step`, `loss`, what was reported of it, and
    `path` of the run; with a `metric` each step that has it, since Tune ends a search whose results lack what
    it compares. A relative storage path starts where this is called, in a submitted job at home. Trials share
    the cluster: each run takes workers up to its maximum, and gives none back to others; its minimum has to
    be there.
    """
    if isinstance(trainer, ElasticTrainer) or not callable(trainer):
        raise ConfigError(
            field="tune.trainable(trainer)",
            problem=f"{type(trainer).__name__} is no function of a trial's config.",
            remedy="Give a function: def trainer(config): return et.ElasticTrainer(...).",
        )
    name = getattr(trainer, "__name__", "trainer")
    said = {"make": staticmethod(trainer), "start": absolute("."), "metric": metric}
    return type(name, (Trial,), said)


def checkpoint_url(result: Any) -> str:
    """Of a result of the search: its run, of which `open_checkpoint` opens the newest checkpoint."""
    if result.checkpoint is None:
        raise ConfigError(
            field="tune.checkpoint_url",
            problem="the result has no checkpoint.",
            remedy="Ask for one: RunConfig(checkpoint_config=CheckpointConfig(checkpoint_at_end=True)).",
        )
    with result.checkpoint.as_directory() as directory:
        return (Path(directory) / CHECKPOINT).read_text()


class Steps(UserCallback):
    """Hears of a run's steps, and tells each once: when the next one, or the end, is known."""

    def __init__(self, told: queue.Queue[dict[str, Any] | None]) -> None:
        self._told = told
        self._step: dict[str, Any] = {}

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        if checkpoint is not None:
            return
        (said,) = metrics
        if self._step and self._step["step"] != said["step"]:
            self._told.put(self._step)
            self._step = {}
        self._step = {**self._step, **said}

    def end(self) -> None:
        if self._step:
            self._told.put(self._step)
        self._told.put(None)


class Trial(tune.Trainable):
    """Drives a run in a thread, which the first `step` starts; `step` waits for its next result."""

    make: ClassVar[Callable[[dict[str, Any]], ElasticTrainer]]
    start: ClassVar[str]
    metric: ClassVar[str | None]

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory([dict(BESIDE_THE_HEAD)])

    def setup(self, config: dict[str, Any]) -> None:
        trainer = type(self).make(config)
        name = f"{trainer.spec.name}-{self.trial_id}"
        path = trainer.spec.storage_path
        if not parse(path).protocol:
            path = os.path.join(type(self).start, path)  # noqa: PTH118 - an absolute one stays
        trainer.spec = dataclasses.replace(trainer.spec, name=name, storage_path=path)
        self._told: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._steps = Steps(self._told)
        trainer.callbacks = (*trainer.callbacks, self._steps)
        self._trainer = trainer
        self._error: BaseException | None = None
        self._measured: dict[str, Any] = {}  # what the run came to
        self._last = 0
        self._tells = False  # a result was told
        self._thread: threading.Thread | None = None

    def step(self) -> dict[str, Any]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="run", daemon=True)
            self._thread.start()
        while True:
            said = self._told.get()
            if said is None:
                self._told.put(None)  # it stays so
                self._thread.join()
                return self._end()
            if said["step"] <= self._last:  # what was run again is told once
                continue
            self._last = said["step"]
            if self.metric is None or self.metric in said:
                self._tells = True
                return {**said, "path": self._path}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / CHECKPOINT).write_text(self._path)

    def load_checkpoint(self, checkpoint: Any) -> None:
        """The run goes on where it was, by its name. ConfigError for the checkpoint of another trial."""
        given = (Path(checkpoint) / CHECKPOINT).read_text()
        if given != self._path:
            raise ConfigError(
                field="tune.TuneConfig(scheduler=...)",
                problem=f"it gives the trial of {self._path} the state of {given}: a trial goes on with its "
                "own run alone.",
                remedy="Use a scheduler that stops trials and moves nothing, such as ASHAScheduler.",
            )

    def cleanup(self) -> None:
        """Stop the run, with a checkpoint, and wait until nothing of it is left."""
        while self._thread is not None and self._thread.is_alive():
            # Again and again: the controller that heard it may be one that this run is about to replace.
            ask_to_stop(self._trainer.spec, "its trial was stopped")
            self._thread.join(ASK_S)

    @property
    def _path(self) -> str:
        return f"{self._trainer.spec.storage_path}/{self._trainer.spec.name}"

    def _end(self) -> dict[str, Any]:
        """The result that ends the trial: its last one once more, which Tune counts once, or else what its
        run had come to before."""
        if self._error is not None:
            raise self._error
        if self._tells:
            return {RESULT_DUPLICATE: True}
        if self.metric is not None and self.metric not in self._measured:
            known = ", ".join(sorted(self._measured.keys() - {"step"})) or "nothing"
            raise ConfigError(
                field="tune.trainable(metric=...)",
                problem=f"no step of {self._path} has {self.metric!r}; what it measured is {known}.",
                remedy="Name what the run reports or evaluates, and evaluate once at least.",
            )
        return {**self._measured, "done": True, "path": self._path}

    def _run(self) -> None:
        try:
            self._measured = dict(self._trainer.fit(quiet=True).metrics or {})
        except Exception as error:  # noqa: BLE001 - raised again where the search asks for a step
            self._error = error
        finally:
            self._steps.end()
