"""What a person calls: a trainer over Ray Train's own config objects, and a way to open checkpoints."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from elastic_train.config import (
    Batch,
    BoundaryLogs,
    Checkpoints,
    Limits,
    LossScale,
    Machines,
    Parallelism,
    Precision,
    Prints,
    ResumeFrom,
    RunSpec,
    Timing,
)
from elastic_train.errors import ConfigError
from elastic_train.option_checks import of_type, positive

if TYPE_CHECKING:
    from ray.train import RunConfig, ScalingConfig

    from elastic_train.checkpoint.reader import Checkpoint
    from elastic_train.cluster.driver.result import Result
    from elastic_train.train.custom.context import Context
    from elastic_train.train.task import Task

_DEFAULT_LOGS = BoundaryLogs()


class ElasticTrainer:
    """Trains a `Task`, or a loop over a `Context`, on as many workers as there are, from `num_workers`'
    minimum to its maximum.

    Takes Ray Train's `ScalingConfig`, `RunConfig`, `FailureConfig` and `CheckpointConfig`; each of their
    fields has its effect or is refused by name. A run without a name has that of its script. `resume_from` is
    a checkpoint of any known system that a new run begins with, as a URL or with a specification. `machines`
    says which machines a run asks for, keeps ready and leaves, `on_event` names a URL or a command that gets
    what happens as JSON. `limits` says what a run puts up with. `boundary_logs` bounds what stages of a
    pipeline keep for their replay; None: nothing. Of `max_steps` and `max_epochs` one is given; what is said
    in epochs builds the data set here, to ask for its length. Nothing is started before `fit`; whatever is
    wrong with the configuration is raised here, as a ConfigError.
    """

    def __init__(
        self,
        task: Task | Callable[[Context], object],
        *,
        batch: Batch,
        max_steps: int | None = None,
        max_epochs: int | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        parallelism: Parallelism | None = None,
        clip_norm: float | None = None,
        optimizer_in_backward: bool = False,
        precision: Precision = "fp32",
        loss_scale: LossScale | None = None,
        checkpoints: Checkpoints | None = None,
        machines: Machines | None = None,
        timing: Timing | None = None,
        limits: Limits | None = None,
        resume_from: ResumeFrom | str | os.PathLike[str] | None = None,
        on_event: str | None = None,
        compare_replicas: int | Literal["auto"] | None = "auto",
        boundary_logs: BoundaryLogs | None = _DEFAULT_LOGS,
        **others: Any,
    ) -> None:
        machines = _machines(machines, others)
        from elastic_train.train.best_metric import check_best
        from elastic_train.train.declaration.loop_task import LoopTask, check_loop_options, task_of

        self.task = task_of(task)
        max_steps, checkpoints = _in_steps(self.task, batch, max_steps, max_epochs, checkpoints)
        self.resume_from = _resume_from(resume_from)
        self.spec = _spec(
            batch=batch,
            max_steps=max_steps,
            scaling_config=scaling_config,
            run_config=run_config,
            parallelism=Parallelism() if parallelism is None else parallelism,
            clip_norm=clip_norm,
            optimizer_in_backward=optimizer_in_backward,
            precision=precision,
            loss_scale=loss_scale,
            checkpoints=checkpoints,
            machines=machines,
            timing=Timing() if timing is None else timing,
            limits=Limits() if limits is None else limits,
            on_event=on_event,
            compare_replicas=compare_replicas,
            boundary_logs=boundary_logs,
        )
        if isinstance(self.task, LoopTask):
            check_loop_options(self.spec)
        check_best(self.task, self.spec)
        self.callbacks = tuple((run_config.callbacks if run_config else None) or ())

    def fit(
        self,
        *,
        address: str | None = None,
        local_nodes: int = 3,
        quiet: bool = False,
        verbose: bool = False,
        prints: Prints = "none",
        page: str | int | None = None,
    ) -> Result:
        """Run to the last step, through whatever happens to the machines, and return the result.

        Uses the Ray cluster that this process is connected to, or the one at `address` or RAY_ADDRESS, as in
        a submitted job, else a local cluster of `local_nodes` nodes with one CPU each. A run of the same name
        and storage path resumes; a finished one says so. `prints` shows what the job's own code
        prints, of the "first" rank or of "all"; `elastic-train logs` has it in any case. `quiet` leaves out
        what the run itself has to say, `verbose` adds the controller's whole reasons to it. `page` is a port
        of this machine, or HOST:PORT, at which the run shows itself while it lasts. Raises UserCodeError,
        InfrastructureError, CapacityTimeout, LeaseHeld or CheckpointError.
        """
        from elastic_train.cluster.driver.launch import fit

        if prints not in get_args(Prints):
            known = ", ".join(map(repr, get_args(Prints)))
            raise ConfigError(field="fit(prints=...)", problem=f"{prints!r} is none of {known}.")
        if local_nodes < 0:
            raise ConfigError(field="fit(local_nodes=...)", problem=f"must be 0 or more, got {local_nodes}.")
        return fit(
            self.task,
            self.spec,
            address=address,
            local_nodes=local_nodes,
            quiet=quiet,
            verbose=verbose,
            prints=prints,
            page=page,
            resume_from=self.resume_from,
            callbacks=self.callbacks,
        )


def open_checkpoint(url: str) -> Checkpoint:
    """A committed checkpoint of a run (its newest) or one checkpoint's directory, read lazily.

    `open_checkpoint(url)["layers.0.attn.wq.weight"]["exp_avg"][0:128]` reads those rows and nothing else.
    """
    from elastic_train.checkpoint.reader import open_checkpoint as open_

    return open_(url)


def _resume_from(given: ResumeFrom | str | os.PathLike[str] | None) -> ResumeFrom | None:
    if given is None or isinstance(given, ResumeFrom):
        return given
    if isinstance(given, str | os.PathLike):
        return ResumeFrom(url=os.fspath(given))
    raise ConfigError(
        field="resume_from",
        problem=f"must be a path, a URL or a ResumeFrom, got {type(given).__name__}.",
    )


def _in_steps(
    task: Task,
    batch: Batch,
    max_steps: int | None,
    max_epochs: int | None,
    checkpoints: Checkpoints | None,
) -> tuple[int, Checkpoints | None]:
    """What was said in epochs, in steps."""
    if (max_steps is None) == (max_epochs is None):
        raise ConfigError(
            field="max_steps",
            problem="and max_epochs are both missing."
            if max_steps is None
            else "and max_epochs are both given.",
            remedy="Say how long to train by one of them.",
        )
    of_type("batch", batch, Batch)
    steps = max_steps
    if max_epochs is not None:
        of_type("max_epochs", max_epochs, int)
        positive("max_epochs", max_epochs)
        steps = max_epochs * _steps_per_epoch(task, batch)
    if isinstance(checkpoints, Checkpoints) and checkpoints.every == "epoch":
        checkpoints = replace(checkpoints, every=_steps_per_epoch(task, batch))
    assert steps is not None
    return steps, checkpoints


def _steps_per_epoch(task: Task, batch: Batch) -> int:
    from elastic_train.train.dataset import steps_per_epoch

    return steps_per_epoch(task, batch)


def _machines(given: Machines | None, others: dict[str, Any]) -> Machines:
    """`given`, with what was said by the names that its options had as the trainer's own."""
    grouped = {field.name for field in fields(Machines)}
    for name in others:
        if name not in grouped:
            near = difflib.get_close_matches(name, ElasticTrainer.__init__.__annotations__, n=1)
            raise ConfigError(
                field=f"ElasticTrainer({name}=...)",
                problem="there is no such option.",
                remedy=f"Did you mean {near[0]!r}?" if near else "",
            )
        instead = f"ElasticTrainer(machines=Machines({name}=...))"
        if given is not None:
            raise ConfigError(
                field=f"ElasticTrainer({name}=...)",
                problem="is an option of Machines, which are given too.",
                remedy=f"Use {instead}.",
            )
        warnings.warn(
            f"ElasticTrainer({name}=...) is an option of Machines: use {instead}", FutureWarning, stacklevel=3
        )
    return Machines(**others) if given is None else given


def _spec(
    *,
    scaling_config: ScalingConfig | None,
    run_config: RunConfig | None,
    checkpoints: Checkpoints | None,
    machines: Machines,
    limits: Limits,
    **rest: Any,
) -> RunSpec:
    from elastic_train.cluster.ray_train_configs import translated

    of_type("limits", limits, Limits)
    said = translated(scaling_config, run_config, checkpoints, limits.failures)
    of_type("machines", machines, Machines)
    chosen = {field.name: getattr(machines, field.name) for field in fields(machines)}
    bounds = {name: getattr(limits, name) for name in ("not_finite", "unsaved", "unsaved_s")}
    return RunSpec(**bounds, **said, **chosen, **rest)
