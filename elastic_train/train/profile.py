"""Profile a model's layers for the planner: seconds and bytes from a traced micro-batch."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Mapping, Set
from dataclasses import replace

from torch import nn

from elastic_train.config import RunSpec
from elastic_train.planner.model_shape import Layer, ModelShape, TensorShape, Widths
from elastic_train.train.declaration.loop_task import LoopTask
from elastic_train.train.layer_trace import Trace, trace_layers
from elastic_train.train.model.build import Blueprint, draw
from elastic_train.train.model.meta_shape import model_shape
from elastic_train.train.model.tensor_names import canonical
from elastic_train.train.parallel.experts import find_experts, number_of_experts
from elastic_train.train.parallel.pipeline_stages import blocks_of
from elastic_train.train.parallel.tp_widths import widths_of
from elastic_train.train.task import Rules, Task

BACKWARD = 3.0  # forward and backward in times of the forward


def profiled_shape(
    task: Task, spec: RunSpec, *, flops_per_s: float, memory_bytes_per_s: float = math.inf
) -> ModelShape:
    """The shape with its layers, from a trace of one micro-batch.

    Until a run measures them, seconds are those of multiplying matrices at `flops_per_s`, and of reading and
    writing what other operations touch at `memory_bytes_per_s`.

    The blocks are those that the task's rules name, or the members of the ModuleList or Sequential with most
    parameters. A model without, or whose forward cannot run without values, keeps the shape without layers,
    and so do those of a loop.
    """
    shape = model_shape(task, spec)
    if isinstance(task, LoopTask):
        return shape
    blueprint, rules = draw(task, spec.precision, spec.batch.seed), task.parallelize()
    found = blocks_of(blueprint.model, rules)
    path, blocks = found.path, found.modules
    if len(blocks) < 2:
        return shape
    stacks = find_experts(blueprint.model, rules)
    embeddings = _embeddings(blueprint)
    trace = trace_layers(task, spec, blueprint, blocks, stacks.values())
    if trace is None:
        return shape
    layers = tuple(
        _layer(trace, at, path, len(blocks), 1 / flops_per_s, 1 / memory_bytes_per_s)
        for at in range(-1, len(blocks) + 1)
    )
    return replace(
        shape,
        tensors=_placed(_expert(shape.tensors, stacks), path, len(blocks), rules, embeddings),
        layers=layers,
        boundary_bytes=trace.boundary,
        positions=trace.positions if rules.sequence else 0,
        sequence=trace.positions if rules.attention else 0,
        widths=_widths(blueprint, rules),
        chain=found.chained,
        tied=bool(blueprint.parameters.aliases),
    )


def _layer(trace: Trace, at: int, path: str, blocks: int, flop_s: float, byte_s: float) -> Layer:
    block, seen = 0 <= at < blocks, trace.layers[at]
    return Layer(
        name="before" if at < 0 else f"{path}.{at}" if block else "after",
        seconds=BACKWARD * seen.flops * flop_s + seen.touched * byte_s,
        activation_bytes=seen.kept,
        dropped_bytes=max(0, seen.kept - seen.selective - trace.boundary) if block else 0,
        dropped_s=seen.repeated_flops * flop_s + seen.touched_again * byte_s if block else 0.0,
        working_bytes=seen.working,
        block=block,
        reductions=4 if block else 1,
        # To the experts and back, in forward and backward.
        exchanges=-(-4 * seen.routed // max(1, trace.boundary)),
    )


def _widths(blueprint: Blueprint, rules: Rules) -> Widths | None:
    """What the rules let axes divide; None where that is nothing."""
    if not (rules.tensor_parallel or rules.attention or rules.experts):
        return None
    return replace(widths_of(blueprint.model), experts=number_of_experts(blueprint.model, rules))


def _expert(tensors: tuple[TensorShape, ...], stacks: Collection[str]) -> tuple[TensorShape, ...]:
    return tuple(replace(t, expert=t.fqn.rpartition(".")[0] in stacks) for t in tensors)


def _placed(
    tensors: tuple[TensorShape, ...], path: str, blocks: int, rules: Rules, embeddings: Set[str]
) -> tuple[TensorShape, ...]:
    """Tensors with their layer, unit and the dim that tensor parallelism cuts."""
    placed: list[TensorShape] = []
    passed = False
    for tensor in tensors:
        inside = tensor.fqn.startswith(f"{path}.")
        passed = passed or inside
        number = int(tensor.fqn[len(path) + 1 :].split(".")[0]) if inside else -1
        layer = 1 + number if inside else (blocks + 1 if passed and tensor.sharded else 0)
        placed.append(
            replace(
                tensor,
                layer=layer,
                unit=f"{path}.{number}" if inside else "",
                tp_dim=_tp_dim(tensor, rules.tensor_parallel, embeddings),
            )
        )
    return tuple(placed)


def _embeddings(blueprint: Blueprint) -> Set[str]:
    named = blueprint.model.named_modules()
    return {canonical(path) for path, module in named if isinstance(module, nn.Embedding)}


def _tp_dim(tensor: TensorShape, patterns: Mapping[str, str], embeddings: Set[str]) -> int | None:
    """The dim that a tensor's module is cut along: an embedding's rows are inputs, a projection's outputs."""
    module = tensor.fqn.rpartition(".")[0]
    for pattern, style in patterns.items():
        if fnmatch.fnmatchcase(module, pattern):
            if style.startswith("column") != (module in embeddings):
                return 0
            return 1 if len(tensor.shape) > 1 else None
    return None
