"""The best checkpoint is one that was measured, whatever the cadences of saving and evaluating are."""

from __future__ import annotations

import math

import pytest

from elastic_train.config import Checkpoints
from elastic_train.errors import ConfigError
from elastic_train.train.best_metric import Best
from elastic_train.train.task import Evaluation, Task, evaluation_of

pytestmark = pytest.mark.ring2


def worth(values: list[float], **options: object) -> list[bool]:
    best = Best(Checkpoints(best="accuracy", **options))
    return [best.is_worth_saving({"accuracy": value}) for value in values]


def test_what_may_be_the_best_is_worth_a_save() -> None:
    assert worth([0.5, 0.4, 0.6, 0.6, 0.5], best_order="max") == [True, False, True, True, False]
    assert worth([0.5, 0.4, 0.6], best_order="min") == [True, True, False]
    assert worth([0.5, 0.4, 0.3, 0.45], best_order="max", keep_best=2) == [True, True, False, True]


def test_an_evaluation_that_would_never_be_made_is_refused() -> None:
    for options, said in [
        ({"every": -1}, "every: must be a whole number"),
        ({"every": 2.5}, "every: must be a whole number"),
        ({"metric": 3}, "metric: must be a function"),
    ]:
        with pytest.raises(ConfigError, match=said):
            Evaluation(dataset=[1], **options)

    class Odd(Task):
        def evaluation(self):
            return [1]

    with pytest.raises(ConfigError, match="returned list, not an Evaluation"):
        evaluation_of(Odd())


def test_what_is_no_number_is_never_the_best() -> None:
    assert worth([math.nan, math.inf, 0.1, math.nan]) == [False, False, True, False]
    assert not Best(Checkpoints(best="accuracy")).is_worth_saving({"loss": 0.1})
    assert not Best(Checkpoints()).is_worth_saving({"loss": 0.1})


def test_an_evaluation_that_lacks_the_metric_is_told_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'acuracy'.*Did you mean 'accuracy'"):
        Best(Checkpoints(best="acuracy")).check_measured(["accuracy", "f1"])
    with pytest.raises(ConfigError, match=r"no metric 'accuracy'.*There is 'loss', 'eval_loss'"):
        Best(Checkpoints(best="accuracy")).check(Evaluation(dataset=[1]))
    Best(Checkpoints(best="accuracy")).check(Evaluation(dataset=[1], metric=lambda o, b: (o, 1)))
    Best(Checkpoints(best="loss")).check_measured(["accuracy"])


def test_a_loss_that_is_not_that_of_the_step_has_another_name() -> None:
    with pytest.raises(ConfigError, match=r"measures 'loss', which is what each step's.*Name it 'eval_loss'"):
        Best(Checkpoints()).check_measured(["accuracy", "loss"], complete=False)
    best = Best(Checkpoints(best="loss"))
    best.check_reported({"loss": 0.5, "accuracy": 1.0}, 0.5)
    best.check_reported({"accuracy": 1.0}, 0.5)
    with pytest.raises(ConfigError, match=r"0\.25 is not the step's own loss, 0\.5.*under another name"):
        best.check_reported({"loss": 0.25}, 0.5)
    Best(Checkpoints(best="eval_loss")).check_reported({"loss": 0.25}, 0.5)
    Best(Checkpoints(best="accuracy")).check_measured(["scores"], complete=False)
