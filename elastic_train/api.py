"""What a person calls: a trainer over Ray Train's own config objects, and a way to open checkpoints."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

from elastic_train.config import (
    Batch,
    BoundaryLogs,
    Checkpoints,
    Notices,
    Parallelism,
    Precision,
    ResumeFrom,
    RunSpec,
    Timing,
)
from elastic_train.errors import ConfigError

if TYPE_CHECKING:
    from ray.train import CheckpointConfig, RunConfig, ScalingConfig

    from elastic_train.checkpoint.reader import Checkpoint
    from elastic_train.cluster.driver.result import Result
    from elastic_train.train.custom.context import Context
    from elastic_train.train.task import Task

DEFAULT_STORAGE = "./runs"
MAX_FAILURES = 3
_DEFAULT_LOGS = BoundaryLogs()


class ElasticTrainer:
    """Trains a `Task`, or a loop over a `Context`, on as many workers as there are, from `num_workers`'
    minimum to its maximum.

    Takes Ray Train's `ScalingConfig`, `RunConfig`, `FailureConfig` and `CheckpointConfig`. `resume_from` is a
    checkpoint of any known system that a new run begins with, as a URL or with a specification. `notices`
    names the cloud whose spot notices are heeded, `on_event` a URL or a command that gets what happens as
    JSON. `boundary_logs` bounds what stages of a pipeline keep for their replay; None: nothing. Nothing is
    started before `fit`; whatever is wrong with the configuration is raised here, as a ConfigError.
    """

    def __init__(
        self,
        task: Task | Callable[[Context], object],
        *,
        batch: Batch,
        max_steps: int,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        parallelism: Parallelism | None = None,
        clip_norm: float | None = None,
        optimizer_in_backward: bool = False,
        precision: Precision = "fp32",
        checkpoints: Checkpoints | None = None,
        standby: int = 1,
        timing: Timing | None = None,
        resume_from: ResumeFrom | str | None = None,
        notices: Notices | None = None,
        on_event: str | None = None,
        compare_replicas: int | Literal["auto"] | None = "auto",
        evict_slower_than: float | None = None,
        boundary_logs: BoundaryLogs | None = _DEFAULT_LOGS,
        **unknown: Any,
    ) -> None:
        _refuse(unknown)
        from elastic_train.train.custom.loop_task import LoopTask, check_loop_options, task_of

        self.task = task_of(task)
        self.resume_from = ResumeFrom(url=resume_from) if isinstance(resume_from, str) else resume_from
        self.spec = _spec(
            batch=batch,
            max_steps=max_steps,
            scaling_config=scaling_config,
            run_config=run_config,
            parallelism=parallelism or Parallelism(),
            clip_norm=clip_norm,
            optimizer_in_backward=optimizer_in_backward,
            precision=precision,
            checkpoints=checkpoints,
            standby=standby,
            timing=timing or Timing(),
            notices=notices,
            on_event=on_event,
            compare_replicas=compare_replicas,
            evict_slower_than=evict_slower_than,
            boundary_logs=boundary_logs,
        )
        if isinstance(self.task, LoopTask):
            check_loop_options(self.spec)
        self.callbacks = tuple((run_config.callbacks if run_config else None) or ())

    def fit(self, *, address: str | None = None, local_nodes: int = 3, quiet: bool = False) -> Result:
        """Run to the last step, through whatever happens to the machines, and return the result.

        Uses the Ray cluster at `address`, else the one this process is connected to, else a local cluster of
        `local_nodes` nodes with one CPU each. A run of the same name and storage path resumes; a finished one
        says so. Raises UserCodeError, InfrastructureError, CapacityTimeout, LeaseHeld or CheckpointError.
        """
        from elastic_train.cluster.driver.launch import fit

        return fit(
            self.task,
            self.spec,
            address=address,
            local_nodes=local_nodes,
            quiet=quiet,
            resume_from=self.resume_from,
            callbacks=self.callbacks,
        )


def open_checkpoint(url: str) -> Checkpoint:
    """A committed checkpoint of a run (its newest) or one checkpoint's directory, read lazily.

    `open_checkpoint(url)["layers.0.attn.wq.weight"]["exp_avg"][0:128]` reads those rows and nothing else.
    """
    from elastic_train.checkpoint.reader import open_checkpoint as open_

    return open_(url)


def _refuse(unknown: dict[str, Any]) -> None:
    for name in unknown:
        near = difflib.get_close_matches(name, ElasticTrainer.__init__.__annotations__, n=1)
        raise ConfigError(
            field=f"ElasticTrainer({name}=...)",
            problem="there is no such option.",
            remedy=f"Did you mean {near[0]!r}?" if near else "",
        )


def _spec(
    *,
    scaling_config: ScalingConfig | None,
    run_config: RunConfig | None,
    checkpoints: Checkpoints | None,
    **rest: Any,
) -> RunSpec:
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

    scaling = scaling_config or ScalingConfig(num_workers=(1, 3))
    run = run_config or RunConfig()
    # Ray Train's default budget of 0 would end every run at its first lost node: it counts as "not said".
    failure = run.failure_config if run.failure_config != FailureConfig() else None
    failure = failure or FailureConfig(max_failures=MAX_FAILURES)
    kept: CheckpointConfig = run.checkpoint_config or CheckpointConfig()
    workers = scaling.num_workers
    least, most = workers if isinstance(workers, tuple) else (workers, workers)
    resources: dict[str, float] = {}
    resources.update(cast("Mapping[str, float]", scaling.resources_per_worker or {}))
    gpus = float(resources.pop("GPU", 1.0 if scaling.use_gpu else 0.0))
    cpus = float(resources.pop("CPU", 1.0))
    if resources:
        raise ConfigError(
            field="scaling_config.resources_per_worker",
            problem=f"only CPU and GPU are known, got {', '.join(sorted(resources))}.",
        )
    if checkpoints is None:
        score = kept.checkpoint_score_attribute
        checkpoints = Checkpoints(
            keep=kept.num_to_keep or Checkpoints().keep, best=score, best_order=kept.checkpoint_score_order
        )
    return RunSpec(
        name=run.name or default_name(),
        storage_path=str(run.storage_path or DEFAULT_STORAGE),
        min_workers=least,
        max_workers=most,
        cpus_per_worker=cpus,
        gpus_per_worker=gpus,
        accelerator=scaling.accelerator_type,
        max_failures=failure.max_failures if failure.max_failures >= 0 else sys.maxsize,
        checkpoints=checkpoints,
        **rest,
    )


def default_name() -> str:
    """The job file's stem."""
    from pathlib import Path

    return Path(sys.argv[0]).stem or "run"
