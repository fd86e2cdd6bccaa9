"""`plan`: list candidate plans for a job on given nodes and explain the choice. Nothing is started."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, get_type_hints

import typer

from elastic_train.checkpoint.read_plan import ReadShare
from elastic_train.cli.job_file import jobs_own_errors, load_job
from elastic_train.cli.output import say, say_json
from elastic_train.cluster.run_reading import summary
from elastic_train.config import RunSpec
from elastic_train.errors import ConfigError
from elastic_train.observe.costs import Costs
from elastic_train.observe.text_columns import columns
from elastic_train.planner.accelerators import PLAIN, PLAIN_FLOPS_PER_S, accelerator
from elastic_train.planner.choose_plan import choose
from elastic_train.planner.explain_plans import Explanation, explain
from elastic_train.planner.explain_plans import table as explain_table
from elastic_train.planner.hardware import Hardware, Link
from elastic_train.planner.model_shape import ModelShape
from elastic_train.planner.plan import Infeasible, Mesh, Plan, WorkerSlot
from elastic_train.planner.problem import Problem
from elastic_train.recovery.boundary_groups import curve
from elastic_train.recovery.logging_forecast import boundaries, sentences
from elastic_train.recovery.selective_logging import steps_between
from elastic_train.storage.fsspec_store import open_store

if TYPE_CHECKING:
    from elastic_train.api import ElasticTrainer


RUNNABLE: Any = {"virtual": (1,), "zero_bubble": True}
"""What workers run: one stage each, with or without split backwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """What a plan is made for: links and memory, and the rates of a worker."""

    hardware: Hardware
    flops_per_s: float
    memory_bytes_per_s: float = math.inf

    @classmethod
    def of(
        cls,
        name: str,
        *,
        memory: float | None = None,
        tflops: float | None = None,
        inside: float | None = None,
        between: float | None = None,
        latency: float | None = None,
    ) -> Machines:
        """Those of a named accelerator, or of a small CPU where `name` is empty, but for what is given.

        GiB, 1e12 operations per second, GB/s, microseconds.
        """
        made = cls(hardware=PLAIN, flops_per_s=PLAIN_FLOPS_PER_S)
        if name:
            known = accelerator(name)
            made = cls(
                hardware=known.hardware,
                flops_per_s=known.flops_per_s,
                memory_bytes_per_s=known.memory_bytes_per_s,
            )
        plain = made.hardware
        return replace(
            made,
            hardware=replace(
                plain,
                inside=_link(plain.inside, inside, latency),
                between=_link(plain.between, between, latency),
                memory_bytes=plain.memory_bytes if memory is None else int(memory * 2**30),
            ),
            flops_per_s=made.flops_per_s if tflops is None else tflops * 1e12,
        )


def _link(known: Link, gigabytes_per_s: float | None, microseconds: float | None) -> Link:
    return Link(
        latency_s=known.latency_s if microseconds is None else microseconds * 1e-6,
        bytes_per_s=known.bytes_per_s if gigabytes_per_s is None else gigabytes_per_s * 1e9,
    )


def show_plan(
    job: str,
    arguments: Sequence[str],
    *,
    nodes: str,
    before: str,
    machines: Machines,
    measured: str = "",
    as_json: bool,
) -> bool:
    """Print the explanation; whether there is a plan. `before` are the nodes that the run is on now,
    `measured` the URL of a run whose steps are shown beside the predicted ones.
    """
    from elastic_train.train.profile import profiled_shape

    trainer = _made(load_job(job), arguments, f"elastic-train plan {job}")
    spec = trainer.spec
    shape = profiled_shape(
        trainer.task,
        spec,
        flops_per_s=machines.flops_per_s,
        memory_bytes_per_s=machines.memory_bytes_per_s,
    )
    hardware = machines.hardware
    if not shape.layers:
        raise ConfigError(
            field="JOB",
            problem="its model is no sequence of blocks that runs on the meta device.",
            remedy="The run itself then plans data-parallel axes from memory alone.",
        )
    problem = Problem(
        worker_slots=worker_slots(nodes),
        shape=shape,
        hardware=hardware,
        micro_batches=spec.batch.micro_batches,
        constraints=spec.parallelism,
        previous=_previous(before, shape, hardware, spec) if before else None,
        **RUNNABLE,
    )
    explanation = explain(problem)
    logs = _logs(explanation, problem, spec)
    costs = summary(open_store(measured)).costs if measured else Costs()
    if as_json:
        paces = {mesh: asdict(pace) for mesh, pace in costs.paces.items()}
        reported = {"nodes": nodes, "before": before, **explanation.json(), "logs": logs, "measured": paces}
        say_json(reported)
        return explanation.feasible
    if explanation.rows:
        say(columns(explain_table(explanation.rows, {m: p.mean_s for m, p in costs.paces.items()})) + "\n")
    say(explanation.reason)
    for line in (*explanation.limits, *logs, *([costs.words] if costs.words else ())):
        say(f"  {line}")
    return explanation.feasible


def _logs(explanation: Explanation, problem: Problem, spec: RunSpec) -> tuple[str, ...]:
    """What logging the boundaries of the chosen plan takes and gives, if its stages can be replayed."""
    chosen = explanation.rows[0] if explanation.rows else None
    if chosen is None or spec.boundary_logs is None or len(chosen.stages) < 2:
        return ()
    interval, link = steps_between(spec.checkpoints), problem.hardware.between.bytes_per_s
    along = boundaries(chosen.stages, problem.shape, problem.micro_batches, interval, link)
    return sentences(curve(along), interval, spec.boundary_logs.budget_bytes)


def held_by_ranks(
    job: str, arguments: Sequence[str], axes: Mapping[str, int]
) -> tuple[tuple[ReadShare, ...], ...]:
    """What each rank of such a mesh would hold of the job's model; its stages have equally many blocks."""
    from elastic_train.train.state.plan_layouts import held, plan_on

    trainer = _made(load_job(job), arguments, f"elastic-train ckpt plan --job {job}")
    return held(trainer.task, trainer.spec, plan_on(trainer.task, trainer.spec, Mesh(**axes)))


def worker_slots(nodes: str) -> tuple[WorkerSlot, ...]:
    """`2x4,1x2`: two nodes of four workers and one of two."""
    found: list[WorkerSlot] = []
    node = 0
    for part in nodes.split(","):
        match = re.fullmatch(r"(\d+)x(\d+)", part.strip())
        if match is None or not int(match[2]):
            raise ConfigError(
                field="--nodes", problem=f"{part!r} is not NODESxWORKERS.", remedy="For example 2x4,1x2."
            )
        for _ in range(int(match[1])):
            found += [WorkerSlot(worker=f"w{node}.{i}", node=f"n{node}") for i in range(int(match[2]))]
            node += 1
    return tuple(found)


def _previous(nodes: str, shape: ModelShape, hardware: Hardware, spec: RunSpec) -> Plan:
    chosen = choose(
        Problem(
            worker_slots=worker_slots(nodes),
            shape=shape,
            hardware=hardware,
            micro_batches=spec.batch.micro_batches,
            constraints=spec.parallelism,
            **RUNNABLE,
        )
    )
    if isinstance(chosen, Infeasible):
        raise ConfigError(field="--before", problem=f"there is no plan for {nodes}: {chosen.reason}.")
    return chosen[0].plan


def _made(trainer: Callable[..., ElasticTrainer], arguments: Sequence[str], name: str) -> ElasticTrainer:
    """What the job's function returns for the options on the command line."""
    made: list[ElasticTrainer] = []

    @functools.wraps(trainer)
    def command(**options: Any) -> None:
        with jobs_own_errors("making the trainer of its options"):
            made.append(trainer(**options))

    command.__annotations__ = get_type_hints(trainer, include_extras=True)
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=inspect.getdoc(trainer))(command)
    app(list(arguments), prog_name=name, standalone_mode=False)
    if not made:  # --help was asked for and shown
        raise typer.Exit
    return made[0]
