"""Ray Train's config objects, field by field. Invariant: *every field has its effect or is refused by name*.

A field of theirs is honoured, holds here by itself, or is refused where somebody sets it: what is accepted
and ignored is found out too late. A field that this file doesn't know, because Ray is newer, is refused, too.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, cast, get_args

from ray.air import config as air
from ray.runtime_env import RuntimeEnv
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.constants import DEFAULT_STORAGE_PATH

from elastic_train.cluster.label_selectors import parsed
from elastic_train.config import Checkpoints, Placement
from elastic_train.errors import ConfigError
from elastic_train.option_checks import of_type

DEFAULT_STORAGE = "./runs"
MAX_FAILURES = 3
UNNAMED = "run"
"""The name of a run that has neither a name nor a script."""

HONOURED = ""
TUNE = "It belongs to Ray Tune; leave it out."
FIELDS: Mapping[str, Mapping[str, str]] = {
    "scaling_config": {
        "num_workers": HONOURED,
        "use_gpu": HONOURED,
        "resources_per_worker": HONOURED,
        "accelerator_type": HONOURED,
        "label_selector": HONOURED,
        "placement_strategy": HONOURED,
        "trainer_resources": "The controller takes no CPU; resources_per_worker are those of a worker.",
        "use_tpu": "Workers run on CPUs and CUDA GPUs.",
        "topology": "It is for TPUs; workers run on CPUs and CUDA GPUs.",
        "elastic_resize_monitor_interval_s": (
            "Nodes are noticed when they come; ElasticTrainer(timing=Timing(join_window_s=...)) says how "
            "long a group waits for more of them."
        ),
    },
    "run_config": {
        "name": HONOURED,
        "storage_path": HONOURED,
        "failure_config": HONOURED,
        "checkpoint_config": HONOURED,
        "callbacks": HONOURED,
        "worker_runtime_env": HONOURED,
        "storage_filesystem": (
            "Give storage_path as a URL that fsspec knows, such as s3://bucket/runs or gs://bucket/runs; "
            "every process opens it by itself."
        ),
        "logging_config": "Set the level of the logger 'elastic_train', or fit(quiet=True).",
        "sync_config": TUNE,
        "verbose": "fit(quiet=True) prints nothing.",
        "stop": "ElasticTrainer(max_steps=...) ends a run, and so does a loop that returns.",
        "progress_reporter": TUNE,
        "log_to_file": "What happens to a run is in its storage: `elastic-train logs RUN`.",
        "local_dir": "It is storage_path now.",
    },
    "failure_config": {
        "max_failures": HONOURED,
        "fail_fast": "Errors of the job's own code always end the run at once; max_failures counts the rest.",
        "controller_failure_limit": HONOURED,
        "max_preemption_failures": HONOURED,
        "relax_collectives_on_preemption": HONOURED,  # survivors always commit without those that left
        "preemption_grace_s": HONOURED,  # survivors are never torn down
    },
    "checkpoint_config": {
        "num_to_keep": HONOURED,
        "checkpoint_score_attribute": HONOURED,
        "checkpoint_score_order": HONOURED,
        "checkpoint_frequency": "ElasticTrainer(checkpoints=Checkpoints(every=...)) says how often.",
        "checkpoint_at_end": "The last step always has a checkpoint.",
        "_checkpoint_keep_all_ranks": "A checkpoint is always whole.",
        "_checkpoint_upload_from_workers": "Peer stores write checkpoints.",
    },
}
"""By argument and field: HONOURED, or what to do instead."""

TYPES: Mapping[str, Mapping[str, Any]] = {
    "scaling_config": {
        "num_workers": int | tuple,
        "use_gpu": bool,
        "resources_per_worker": Mapping | None,
        "accelerator_type": str | None,
        "label_selector": Mapping | list | None,
    },
    "run_config": {
        "name": str | None,
        "storage_path": str | os.PathLike | None,
        "failure_config": FailureConfig | air.FailureConfig | None,
        "checkpoint_config": CheckpointConfig | air.CheckpointConfig | None,
        "callbacks": list | tuple | None,
        "worker_runtime_env": Mapping | None,
    },
    "failure_config": {
        "max_failures": int,
        "controller_failure_limit": int,
        "max_preemption_failures": int,
        "relax_collectives_on_preemption": bool,
        "preemption_grace_s": float | None,
    },
    "checkpoint_config": {"num_to_keep": int | None, "checkpoint_score_attribute": str | None},
}
"""Of what is honoured: Ray checks little of it."""

KINDS: Mapping[str, tuple[type, ...]] = {
    "scaling_config": (ScalingConfig, air.ScalingConfig),
    "run_config": (RunConfig, air.RunConfig),
    "failure_config": (FailureConfig, air.FailureConfig),
    "checkpoint_config": (CheckpointConfig, air.CheckpointConfig),
}


def translated(
    scaling: ScalingConfig | None,
    run: RunConfig | None,
    checkpoints: Checkpoints | None,
    max_failures: int | None,
) -> dict[str, Any]:
    """The fields of a RunSpec that Ray Train's config objects state, and `max_failures` where it is given."""
    scaling = scaling if scaling is not None else ScalingConfig(num_workers=(1, 3))
    run = run if run is not None else RunConfig()
    check("scaling_config", scaling)
    check("run_config", run)
    failure = run.failure_config if run.failure_config is not None else FailureConfig()
    kept = run.checkpoint_config if run.checkpoint_config is not None else CheckpointConfig()
    check("failure_config", failure)
    check("checkpoint_config", kept)
    return {
        **_workers(scaling),
        "name": run.name if run.name and not _filled_in(run.name) else default_name(),
        "storage_path": _storage(run.storage_path),
        "worker_environment": _environment(getattr(run, "worker_runtime_env", None)),
        "checkpoints": _checkpoints(kept, checkpoints),
        "max_failures": _budget(failure, max_failures),
        **_limits(failure),
    }


def check(argument: str, config: object) -> None:
    """ConfigError for what is no such config object, and for a field that is set and would do nothing."""
    kind = next((kind for kind in KINDS[argument] if isinstance(config, kind)), None)
    if kind is None:
        raise ConfigError(
            field=argument,
            problem=f"must be a ray.train.{KINDS[argument][0].__name__}, got {type(config).__name__}.",
        )
    unset = kind()
    for field in fields(config):  # pyright: ignore[reportArgumentType]
        remedy = FIELDS[argument].get(field.name, "This release does not know it; leave it out.")
        value = getattr(config, field.name)
        if value is getattr(unset, field.name, field.default):
            continue
        if remedy == HONOURED:
            of_type(f"{argument}.{field.name}", value, TYPES[argument].get(field.name, Any))
        elif value != getattr(unset, field.name, field.default):
            raise ConfigError(
                field=f"{argument}.{field.name}", problem=f"{value!r} would have no effect.", remedy=remedy
            )


def default_name() -> str:
    """The name of the script that runs, so that the same script is the same run."""
    script = Path(sys.argv[0])
    if script.name == "__main__.py":  # `python -m package`
        return script.parent.name
    if not script.name or script.name == "-c" or "ipykernel" in script.name:
        return UNNAMED
    return script.stem


def _filled_in(name: str) -> bool:
    """Whether Ray Train made the name up, from the time: with it a run would never resume."""
    return re.fullmatch(r"ray_train_run-\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", name) is not None


def _storage(path: object) -> str:
    # The very object that Ray fills in; an equal path of a person's own is another one.
    return DEFAULT_STORAGE if path is None or path is DEFAULT_STORAGE_PATH else str(path)


def _budget(failure: FailureConfig, own: int | None) -> int:
    """Ray Train's default of 0 would end every run at its first lost node: it counts as "not said"."""
    said = failure.max_failures
    if own is None:
        return MAX_FAILURES if said == 0 else said if said > 0 else sys.maxsize
    if said not in (0, own):
        raise ConfigError(
            field="failure_config.max_failures",
            problem=f"it says {said}, and Limits(failures={own}) another number.",
            remedy="Say it once.",
        )
    return own


def _limits(failure: FailureConfig) -> dict[str, int]:
    """Ray Train's -1 is "any number"; of a controller that never comes to a step it is ours."""
    said = {
        "max_restarts": getattr(failure, "controller_failure_limit", -1),
        "max_preemptions": getattr(failure, "max_preemption_failures", -1),
    }
    return {name: limit for name, limit in said.items() if limit >= 0}


def _workers(scaling: ScalingConfig) -> dict[str, Any]:
    workers = scaling.num_workers
    least, most = workers if isinstance(workers, tuple) else (workers, workers)
    resources: dict[str, float] = {}
    resources.update(cast("Mapping[str, float]", scaling.resources_per_worker or {}))
    gpus = float(resources.pop("GPU", 1.0 if scaling.use_gpu else 0.0))
    cpus = float(resources.pop("CPU", 1.0))
    if gpus not in (0.0, 1.0):
        raise ConfigError(
            field="scaling_config.resources_per_worker",
            problem=f"GPU={gpus:g}: a worker is one process on one whole GPU. Communicators refuse two ranks "
            "on the same one, and a second one of a worker would stand idle.",
            remedy="Ask for GPU=1 and as many workers as there are GPUs, or for none.",
        )
    if resources:
        raise ConfigError(
            field="scaling_config.resources_per_worker",
            problem=f"only CPU and GPU are known, got {', '.join(sorted(resources))}.",
            remedy="label_selector and accelerator_type choose nodes.",
        )
    placement = scaling.placement_strategy
    if placement not in get_args(Placement):
        raise ConfigError(
            field="scaling_config.placement_strategy",
            problem=f"{placement!r} is none of PACK, SPREAD and STRICT_SPREAD.",
            remedy="A run that must stay on one node would end with it; label_selector can name one.",
        )
    return {
        "min_workers": least,
        "max_workers": most,
        "cpus_per_worker": cpus,
        "gpus_per_worker": gpus,
        "accelerator": scaling.accelerator_type,
        "labels": _labels(getattr(scaling, "label_selector", None)),
        "placement": placement,
    }


def _labels(selector: object) -> tuple[tuple[str, str], ...]:
    given = selector if isinstance(selector, list) else [selector or {}]
    first = cast("dict[str, str]", given[0] if given else {})
    if any(other != first for other in given):
        raise ConfigError(
            field="scaling_config.label_selector",
            problem="it differs by worker, and workers change places when nodes come and go.",
            remedy="Give one selector for all of them.",
        )
    for key, value in first.items():
        parsed(key, value)
    return tuple(sorted(first.items()))


def _environment(environment: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if not environment:
        return {}
    unknown = sorted(set(environment) - RuntimeEnv.known_fields)
    if unknown:
        raise ConfigError(
            field="run_config.worker_runtime_env",
            problem=f"Ray knows no {', '.join(unknown)}.",
            remedy=f"It knows {', '.join(sorted(n for n in RuntimeEnv.known_fields if n[0] != '_'))}.",
        )
    for name in ("working_dir", "py_modules"):
        given = environment.get(name) or ()
        local = [p for p in ([given] if isinstance(given, str) else given) if "://" not in str(p)]
        if local:
            raise ConfigError(
                field=f"run_config.worker_runtime_env[{name!r}]",
                problem=f"{local[0]} is a path of this machine, and workers are started from another.",
                remedy="Give a URI, or `ray job submit --working-dir`, for all processes of the job.",
            )
    try:
        return dict(RuntimeEnv(**environment))
    except (TypeError, ValueError) as error:
        raise ConfigError(field="run_config.worker_runtime_env", problem=f"{error}") from error


def _checkpoints(kept: CheckpointConfig, own: Checkpoints | None) -> Checkpoints:
    """Ray Train keeps the best `num_to_keep` and the newest where it is given a score, else the newest."""
    score, number = kept.checkpoint_score_attribute, kept.num_to_keep
    if own is not None:
        if kept != type(kept)():
            raise ConfigError(
                field="run_config.checkpoint_config",
                problem=f"{kept!r} and checkpoints={own!r} both say which checkpoints stay.",
                remedy="Say it in Checkpoints(keep=..., best=...) alone.",
            )
        return own
    if score is None and kept.checkpoint_score_order != type(kept)().checkpoint_score_order:
        raise ConfigError(
            field="checkpoint_config.checkpoint_score_order",
            problem=f"{kept.checkpoint_score_order!r} has no effect without checkpoint_score_attribute.",
            remedy="Name the metric.",
        )
    if score is None:
        return Checkpoints() if number is None else Checkpoints(keep=number)
    order = cast('Literal["min", "max"]', kept.checkpoint_score_order)
    if number is None:
        return Checkpoints(best=score, best_order=order)
    return Checkpoints(keep=1, best=score, best_order=order, keep_best=number)
