"""Best-checkpoint metric: check that the job reports it, and decide at which steps it is worth a save.

A checkpoint can only be the best one if it was taken where the metric was measured. So a measurement that may
be the best of its generation is saved, whenever checkpoints are due otherwise.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping

from elastic_train.config import Checkpoints, RunSpec
from elastic_train.errors import ConfigError
from elastic_train.train.task import EVAL_LOSS, Evaluation, Task

LOSS = "loss"
"""The metric that every step has: of the samples that it trained on."""


def check_best(task: Task, spec: RunSpec) -> None:
    """ConfigError where the job measures nothing that could be the metric. A loop reports what it likes."""
    best = spec.checkpoints.best
    nothing = getattr(task.evaluation, "__func__", None) is Task.evaluation
    if best in (None, LOSS) or not nothing or hasattr(task, "loop"):
        return
    raise _unknown(str(best), [LOSS], "the task has no evaluation()")


class Best:
    """What was measured of the metric in this generation. All ranks measure the same."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._sign = 1.0 if checkpoints.best_order == "max" else -1.0
        self._kept: list[float] = []  # ascending, the larger the better

    def check(self, evaluation: Evaluation | None) -> None:
        """Before step 1, where an evaluation says which metrics it has."""
        if evaluation is not None and evaluation.metric is None and evaluation.summary is None:
            self.check_measured([EVAL_LOSS])

    def check_reported(self, metrics: Mapping[str, float], loss: float) -> None:
        """ConfigError where a loop reports as the loss what is not that of the step, and it is compared."""
        reported = metrics.get(LOSS, loss)
        if self._checkpoints.best == LOSS and reported != loss and math.isfinite(loss):
            raise ConfigError(
                field="ctx.report(loss=...)",
                problem=f"{reported:.6g} is not the step's own loss, {loss:.6g}, by which the best "
                "checkpoint is chosen where nothing is reported.",
                remedy=f"Report it under another name, such as {EVAL_LOSS!r}, and choose by that.",
            )

    def check_measured(self, names: Collection[str], *, complete: bool = True) -> None:
        """ConfigError where an evaluation was made and the metric is none of its results, or where one of
        them would be taken for the loss of the step. Unless `complete`, more is measured than these."""
        best = self._checkpoints.best
        if LOSS in names:
            raise ConfigError(
                field="task.evaluation",
                problem=f"it measures {LOSS!r}, which is what each step's own loss is called: reports and "
                "the choice of the best checkpoint would mix the two.",
                remedy=f"Name it {EVAL_LOSS!r}.",
            )
        if complete and best not in (None, LOSS, *names):
            raise _unknown(str(best), [LOSS, *names], "the evaluation does not measure it")

    def is_worth_saving(self, metrics: Mapping[str, float]) -> bool:
        """Whether the state that these metrics are of may be among the best."""
        best = self._checkpoints.best
        value = math.nan if best is None else self._sign * metrics.get(best, math.nan)
        if not math.isfinite(value):
            return False
        if len(self._kept) == self._checkpoints.keep_best and value < self._kept[0]:
            return False
        self._kept = sorted([*self._kept, value])[-self._checkpoints.keep_best :]
        return True


def _unknown(best: str, known: Iterable[str], why: str) -> ConfigError:
    names = list(dict.fromkeys(known))
    near = difflib.get_close_matches(best, names, n=1)
    return ConfigError(
        field="checkpoints.best",
        problem=f"there is no metric {best!r}: {why}.",
        remedy=f"Did you mean {near[0]!r}?" if near else f"There is {', '.join(map(repr, names))}.",
    )
