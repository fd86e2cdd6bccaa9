"""Whatever value an option is given, it is one that works or is refused by the option's name."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

import elastic_train as et
from elastic_train import config
from elastic_train.errors import ConfigError
from tests.tasks.tiny import TinyTask

pytestmark = pytest.mark.ring2
ODD: tuple[Any, ...] = (
    *(0, -1, -2, 2.5, -0.5, math.inf, -math.inf, math.nan, 2**70, 1e-300, True, None),
    *("", "x", (), [], {}, (0, 0), (2, 1), (1, 2, 3), ("a", "b"), (1.5, 2), object()),
)
OWN: dict[type, dict[str, Any]] = {
    config.Batch: {"global_size": 8, "micro_size": 4},
    config.BoundaryLogs: {},
    config.Checkpoints: {},
    config.Limits: {},
    config.LossScale: {},
    config.Machines: {},
    config.Notices: {"cloud": "aws"},
    config.Parallelism: {},
    config.ResumeFrom: {"url": "/runs/before"},
    config.Timing: {},
}
RAYS = (ScalingConfig, RunConfig, FailureConfig, CheckpointConfig)
NAMED_SO: dict[str, str] = {"checkpoint_score_attribute": "score_attribute|metric", "num_workers": "workers"}
"""Options whose refusal names what they mean."""


def odd_fields(kinds: Any) -> Iterator[tuple[type, str]]:
    return ((kind, field.name) for kind in kinds for field in fields(kind))


@pytest.mark.parametrize(
    ("kind", "name"), list(odd_fields(OWN)), ids=lambda value: getattr(value, "__name__", value)
)
def test_an_option_of_ours_is_taken_or_refused_by_name(kind: type, name: str) -> None:
    for value in ODD:
        said = refusal(lambda value=value: kind(**{**OWN[kind], name: value}))
        assert said is None or name in said or "loss_scale" in said, (value, said)


@pytest.mark.parametrize(
    ("kind", "name"), list(odd_fields(RAYS)), ids=lambda value: getattr(value, "__name__", value)
)
def test_an_option_of_ray_trains_is_taken_or_refused_by_name(kind: type, name: str) -> None:
    for value in ODD:
        try:
            given: Any = kind(**{name: value})
        except Exception:  # noqa: BLE001 - Ray itself refuses it
            continue
        if kind in (FailureConfig, CheckpointConfig):
            argument = "failure_config" if kind is FailureConfig else "checkpoint_config"
            options: dict[str, Any] = {argument: given}
            given = RunConfig(**options)
        told = "scaling_config" if kind is ScalingConfig else "run_config"
        taken_or_named({told: given}, NAMED_SO.get(name, name), value)


def options_of_the_trainer() -> list[str]:
    known = inspect.signature(et.ElasticTrainer.__init__).parameters.values()
    return [p.name for p in known if p.kind is p.KEYWORD_ONLY]


@pytest.mark.parametrize("name", options_of_the_trainer())
def test_an_option_of_the_trainer_is_taken_or_refused_by_name(name: str) -> None:
    for value in ODD:
        taken_or_named({name: value}, NAMED_SO.get(name, name), value)


def taken_or_named(options: dict[str, Any], name: str, value: Any) -> None:
    required = {"batch": et.Batch(global_size=8, micro_size=4), "max_steps": 4}
    said = refusal(lambda: et.ElasticTrainer(TinyTask(), **{**required, **options}))
    assert said is None or re.search(name, said), (value, said)


def refusal(make: Callable[[], object]) -> str | None:
    """What was said where it is refused; any other error is a fault of ours."""
    try:
        make()
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", [field.name for field in fields(config.Timing)])
def test_a_time_without_an_end_is_refused_with_what_to_say(name: str) -> None:
    given: dict[str, Any] = {name: math.inf}
    with pytest.raises(ConfigError, match=rf"timing\.{name}: must be at most 1e\+09 s"):
        config.Timing(**given)
