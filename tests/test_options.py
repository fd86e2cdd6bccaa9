"""Every option has its effect or is refused by name. None is accepted and ignored."""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs
import pytest
from ray.air import config as air
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

import elastic_train as et
from elastic_train import config
from elastic_train.cluster.label_selectors import selected
from elastic_train.cluster.ray_train_configs import FIELDS, HONOURED, KINDS, check, default_name
from elastic_train.errors import ConfigError
from tests.tasks.tiny import TinyTask

pytestmark = pytest.mark.ring2
PACKAGE = Path(config.__file__).parent
BATCH = et.Batch(global_size=12, micro_size=2)
OWN = [
    config.Batch,
    config.BoundaryLogs,
    config.Checkpoints,
    config.Limits,
    config.Machines,
    config.Notices,
    config.Parallelism,
    config.ResumeFrom,
    config.RunSpec,
    config.Timing,
]


def spec_of(**options: Any) -> config.RunSpec:
    return et.ElasticTrainer(TinyTask(), batch=BATCH, max_steps=4, **options).spec


def read_names() -> set[str]:
    """Attributes that are read anywhere in the package but where options are declared."""
    trees = (ast.parse(f.read_text()) for f in PACKAGE.rglob("*.py") if f != Path(config.__file__))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}


def test_every_field_of_our_options_is_read_somewhere() -> None:
    # Axes are read by name, as a mesh has them.
    known = read_names() | set(config.Parallelism.__slots__)
    unread = [f"{kind.__name__}.{f.name}" for kind in OWN for f in fields(kind) if f.name not in known]
    assert not unread


@pytest.mark.parametrize("argument", sorted(KINDS))
def test_every_field_of_ray_trains_config_objects_is_honoured_or_refused(argument: str) -> None:
    kinds = KINDS[argument]
    assert {f.name for kind in kinds for f in fields(kind)} == FIELDS[argument].keys()


def refused() -> Iterator[tuple[str, type, str]]:
    for argument, kinds in KINDS.items():
        for kind in kinds:
            for field in fields(kind):
                if FIELDS[argument][field.name] != HONOURED:
                    yield argument, kind, field.name


@pytest.mark.parametrize(("argument", "kind", "name"), list(refused()), ids=lambda value: str(value))
def test_a_field_that_would_have_no_effect_is_refused_with_a_remedy(
    argument: str, kind: type, name: str
) -> None:
    made = kind()
    check(argument, made)
    object.__setattr__(made, name, "something else")  # some are refused by Ray itself where they are given
    with pytest.raises(ConfigError) as raised:
        check(argument, made)
    assert raised.value.field == f"{argument}.{name}"
    assert raised.value.remedy == FIELDS[argument][name]


def test_what_is_no_config_object_of_ray_train_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"scaling_config: must be a ray.train.ScalingConfig, got dict"):
        spec_of(scaling_config={"num_workers": 2})
    assert spec_of(scaling_config=air.ScalingConfig(num_workers=2)).max_workers == 2


def test_storage_filesystem_is_refused_and_a_url_named() -> None:
    run = RunConfig(name="a", storage_path="b/runs", storage_filesystem=pyarrow.fs.LocalFileSystem())
    with pytest.raises(ConfigError, match=r"storage_filesystem.*s3://bucket/runs"):
        spec_of(run_config=run)


# -- what is honoured ------------------------------------------------------------------------------------


def test_the_same_script_is_the_same_run() -> None:
    first = spec_of(run_config=RunConfig())
    time.sleep(1.1)  # Ray Train's own name for it is made of seconds
    assert spec_of(run_config=RunConfig()).name == first.name == spec_of().name == default_name()
    assert first.storage_path == spec_of().storage_path == "./runs"


def test_a_name_and_a_path_that_a_person_gives_are_theirs() -> None:
    ray_results = str(Path("~/ray_results").expanduser())
    spec = spec_of(run_config=RunConfig(name="ray_train_run-mine", storage_path=ray_results))
    assert (spec.name, spec.storage_path) == ("ray_train_run-mine", ray_results)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("jobs/pretrain_lm.py", "pretrain_lm"),
        ("/srv/package/__main__.py", "package"),
        ("-c", "run"),
        ("", "run"),
        ("/usr/lib/python3/ipykernel_launcher.py", "run"),
    ],
)
def test_a_run_is_named_after_its_script(monkeypatch: pytest.MonkeyPatch, script: str, name: str) -> None:
    monkeypatch.setattr(sys, "argv", [script])
    assert default_name() == name


@pytest.mark.parametrize("name", ["a/b", "..", ".", " a", "a\x1b[31m", "a\nb"])
def test_a_name_that_is_no_directory_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run_config\.name"):
        spec_of(run_config=RunConfig(name=name))


def test_max_failures_of_zero_counts_as_not_said_and_limits_can_say_it() -> None:
    none = RunConfig(failure_config=FailureConfig(max_failures=0))
    assert spec_of(run_config=none).max_failures == spec_of().max_failures == 3
    assert spec_of(run_config=none, limits=et.Limits(failures=0)).max_failures == 0
    assert spec_of(run_config=RunConfig(failure_config=FailureConfig(max_failures=-1))).max_failures > 10**6
    with pytest.raises(ConfigError, match="Say it once"):
        spec_of(
            run_config=RunConfig(failure_config=FailureConfig(max_failures=2)), limits=et.Limits(failures=1)
        )


def test_limits_of_ray_train_are_honoured_and_its_minus_one_is_not_said() -> None:
    config = FailureConfig(max_preemption_failures=2, controller_failure_limit=0)
    made = spec_of(run_config=RunConfig(failure_config=config))
    assert (made.max_preemptions, made.max_restarts) == (2, 0)
    assert (spec_of().max_preemptions, spec_of().max_restarts) == (None, 10)


def test_checkpoints_that_are_not_written_are_borne_as_long_as_is_said() -> None:
    assert (spec_of().unsaved, spec_of().unsaved_s) == (None, None)
    made = spec_of(limits=et.Limits(unsaved=3, unsaved_s=60.0))
    assert (made.unsaved, made.unsaved_s) == (3, 60.0)
    with pytest.raises(ConfigError, match=r"limits\.unsaved: must be positive"):
        et.Limits(unsaved=0)


def test_a_score_keeps_the_best_and_the_newest() -> None:
    kept = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    made = spec_of(run_config=RunConfig(checkpoint_config=kept)).checkpoints
    assert (made.keep, made.keep_best, made.best, made.best_order) == (1, 2, "loss", "min")
    assert (
        spec_of(run_config=RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=7))).checkpoints.keep == 7
    )


def test_two_places_that_say_which_checkpoints_stay_are_one_too_many() -> None:
    run = RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=2))
    with pytest.raises(ConfigError, match="both say which checkpoints stay"):
        spec_of(run_config=run, checkpoints=et.Checkpoints(every=5))


def test_an_order_without_a_metric_is_refused() -> None:
    with pytest.raises(ConfigError, match="no effect without it"):
        et.Checkpoints(keep_best=2)
    kept = CheckpointConfig(checkpoint_score_order="min")
    with pytest.raises(ConfigError, match="no effect without checkpoint_score_attribute"):
        spec_of(run_config=RunConfig(checkpoint_config=kept))


@pytest.mark.parametrize("name", ["acuracy", "los"])
def test_a_score_that_nothing_measures_is_refused(name: str) -> None:
    kept = CheckpointConfig(checkpoint_score_attribute=name)
    with pytest.raises(ConfigError, match=f"there is no metric '{name}'"):
        spec_of(run_config=RunConfig(checkpoint_config=kept))


def test_a_label_selector_leaves_the_nodes_that_it_means() -> None:
    made = spec_of(scaling_config=ScalingConfig(num_workers=2, label_selector={"market": "!spot"}))
    assert made.labels == (("market", "!spot"),)
    for selector, labels, meant in [
        ("spot", {"market": "spot"}, True),
        ("spot", {}, False),
        ("!spot", {}, True),
        ("!spot", {"market": "spot"}, False),
        ("in(a, b)", {"market": "b"}, True),
        ("in(a, b)", {"market": "c"}, False),
        ("!in(a,b)", {"market": "a"}, False),
        ("!in(a,b)", {"market": "c"}, True),
    ]:
        assert selected(labels, [("market", selector)]) is meant, selector


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"label_selector": [{"a": "1"}, {"a": "2"}]}, "label_selector: it differs by worker"),
        ({"label_selector": {"a": "(b"}}, "is no label selector"),
        ({"placement_strategy": "STRICT_PACK"}, "none of PACK, SPREAD and STRICT_SPREAD"),
    ],
)
def test_a_place_that_cannot_be_kept_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        spec_of(scaling_config=ScalingConfig(num_workers=2, **options))


def test_the_runtime_environment_of_workers_is_kept_and_its_typos_are_told() -> None:
    mine = {"env_vars": {"HF_HOME": "/data"}}
    assert (
        spec_of(run_config=RunConfig(worker_runtime_env=mine)).worker_environment["env_vars"]
        == mine["env_vars"]
    )
    with pytest.raises(ConfigError, match=r"worker_runtime_env: Ray knows no envvars"):
        spec_of(run_config=RunConfig(worker_runtime_env={"envvars": {}}))
    with pytest.raises(ConfigError, match="worker_runtime_env"):
        spec_of(run_config=RunConfig(worker_runtime_env={"env_vars": {"A": 1}}))
    with pytest.raises(ConfigError, match=r"worker_runtime_env\['working_dir'\]: \./code is a path"):
        spec_of(run_config=RunConfig(worker_runtime_env={"working_dir": "./code"}))


# -- values that are none ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (
            et.Batch,
            {"global_size": 8.5, "micro_size": 1},
            r"batch\.global_size: must be a whole number, got 8.5",
        ),
        (et.Batch, {"global_size": 8, "micro_size": "2"}, r"batch\.micro_size: must be a whole number"),
        (et.Batch, {"global_size": 8, "micro_size": 2, "shuffle": 1}, "must be True or False, got 1"),
        (et.Checkpoints, {"every": "automatic"}, r"checkpoints\.every: must be a whole number or 'auto'"),
        (et.Checkpoints, {"pressure": "wiat"}, "must be 'wait' or 'skip' or 'coalesce', got 'wiat'"),
        (et.Checkpoints, {"best_order": "mx"}, r"checkpoints\.best_order"),
        (et.Timing, {"lease_s": float("nan")}, r"timing\.lease_s: must be positive, got nan"),
        (et.Timing, {"lease_s": "10"}, r"timing\.lease_s: must be a number, got '10'"),
        (et.Parallelism, {"tp": 2.0}, r"parallelism\.tp: must be a whole number or None"),
        (et.ResumeFrom, {"url": None}, r"resume_from\.url: must be a text"),
        (et.Machines, {"standby": 1.5}, r"machines\.standby: must be a whole number"),
        (et.Limits, {"not_finite": 0}, r"limits\.not_finite: must be positive"),
        (et.BoundaryLogs, {"disk_bytes": -1}, r"boundary_logs\.disk_bytes: must be 0 or more"),
    ],
)
def test_a_value_of_another_type_is_refused_where_it_is_given(
    kind: type, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        kind(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": "fp8"}, "precision: must be 'fp32' or 'bf16' or 'fp16' or 'fp64', got 'fp8'"),
        ({"machines": {"standby": 0}}, "machines: must be a Machines"),
        ({"machines": et.Machines(standby=-1)}, "machines.standby: must be 0 or more"),
        (
            {"machines": et.Machines(), "standby": 0},
            r"given too\. Use ElasticTrainer\(machines=Machines\(standby=\.\.\.\)\)",
        ),
        ({"clip_norm": "1"}, "clip_norm: must be a number or None"),
        ({"parallelism": {"tp": 2}}, "parallelism: must be a Parallelism"),
        ({"checkpoints": 5}, "checkpoints: must be a Checkpoints"),
        ({"on_event": ""}, "on_event: is empty"),
        ({"resume_from": 5}, "resume_from: must be a path, a URL or a ResumeFrom"),
    ],
)
def test_an_option_of_the_trainer_of_another_type_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        spec_of(**options)


def test_options_of_machines_are_taken_by_the_names_that_they_had() -> None:
    with pytest.warns(FutureWarning, match=r"use ElasticTrainer\(machines=Machines\(standby=\.\.\.\)\)"):
        spec = spec_of(standby=0)
    assert spec.standby == 0


def test_numbers_of_numpy_are_numbers() -> None:
    sizes: dict[str, Any] = {"global_size": np.int64(8), "micro_size": np.int32(2)}
    seconds: Any = np.float32(3.0)
    assert et.Batch(**sizes).micro_batches == 4
    assert replace(et.Timing(), lease_s=seconds).lease_s == 3.0
