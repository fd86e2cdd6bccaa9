"""Profile a model's layers (FLOPs, bytes, activations) by one forward on the meta device."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from elastic_train.config import RunSpec
from elastic_train.data.numbered import tell_epoch
from elastic_train.planner.model_shape import Layer, ModelShape, TensorShape, Widths
from elastic_train.train.declaration.loop_task import LoopTask
from elastic_train.train.model.build import DTYPE_OF, Blueprint, draw
from elastic_train.train.model.collate import caller, placed
from elastic_train.train.model.meta_shape import model_shape
from elastic_train.train.model.tensor_names import canonical
from elastic_train.train.parallel.experts import find_experts, number_of_experts
from elastic_train.train.parallel.pipeline_stages import blocks_of
from elastic_train.train.parallel.sequence_parallel import POSITIONS
from elastic_train.train.parallel.tp_widths import widths_of
from elastic_train.train.task import Rules, Task

BACKWARD = 3.0  # forward and backward in times of the forward


@dataclass(slots=True, kw_only=True)
class _Seen:
    """By block, -1 before the first and `len(blocks)` after the last."""

    flops: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    saved: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    routed: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # bytes into experts
    boundary: int = 0
    positions: int = 0
    at: int = -1


def profiled_shape(task: Task, spec: RunSpec, *, flops_per_s: float) -> ModelShape:
    """The shape with its layers. Seconds are operations over `flops_per_s`, until a run measures them.

    The blocks are those that the task's rules name, or the members of the ModuleList or Sequential with most
    parameters. A model without, or whose forward cannot run without values, keeps the shape without layers,
    and so do those of a loop.
    """
    shape = model_shape(task, spec)
    if isinstance(task, LoopTask):
        return shape
    blueprint, rules = draw(task, spec.precision, spec.batch.seed), task.parallelize()
    found = blocks_of(blueprint.model, rules)
    path, blocks = found.path, list(found.modules)
    if len(blocks) < 2:
        return shape
    stacks = find_experts(blueprint.model, rules)
    forward = partial(_forward, task, spec, blueprint, blocks, stacks)
    seen = forward(nullcontext()) or forward(FakeTensorMode(allow_non_fake_inputs=True))
    if seen is None:
        return shape
    rows = tuple(
        Layer(
            name="before" if at < 0 else "after" if at == len(blocks) else f"{path}.{at}",
            seconds=BACKWARD * seen.flops[at] / flops_per_s,
            activation_bytes=int(seen.saved[at]),
            block=0 <= at < len(blocks),
            reductions=4 if 0 <= at < len(blocks) else 1,
            # To the experts and back, in forward and backward.
            exchanges=-(-4 * seen.routed[at] // max(1, seen.boundary)),
        )
        for at in range(-1, len(blocks) + 1)
    )
    return replace(
        shape,
        tensors=_placed(_expert(shape.tensors, stacks), path, len(blocks), rules, _embeddings(blueprint)),
        layers=rows,
        boundary_bytes=seen.boundary,
        positions=seen.positions if rules.sequence else 0,
        widths=_widths(blueprint, rules),
        chain=found.chained,
        compute_bytes=2 if spec.precision == "bf16" else None,
        tied=bool(blueprint.parameters.aliases),
    )


def _widths(blueprint: Blueprint, rules: Rules) -> Widths | None:
    """What the rules let axes divide; None where that is nothing."""
    if not rules.tensor_parallel and not rules.experts:
        return None
    return replace(widths_of(blueprint.model), experts=number_of_experts(blueprint.model, rules))


def _expert(tensors: tuple[TensorShape, ...], stacks: Collection[str]) -> tuple[TensorShape, ...]:
    return tuple(replace(t, expert=t.fqn.rpartition(".")[0] in stacks) for t in tensors)


def _forward(
    task: Task,
    spec: RunSpec,
    blueprint: Blueprint,
    blocks: list[nn.Module],
    stacks: Mapping[str, nn.Module],
    mode: AbstractContextManager[Any],
) -> _Seen | None:
    """Operations and saved bytes by block, for one micro-batch; None where forward needs values.

    `mode` is where it runs: with fake tensors, models that look for tracing leave out what needs values.
    """
    seen, counter = _Seen(), FlopCounterMode(display=False)
    parameters = {id(p) for p in blueprint.model.parameters()}
    counted = 0.0

    def settle(at: int) -> None:
        nonlocal counted
        total = float(counter.get_total_flops())
        seen.flops[seen.at] += total - counted
        counted, seen.at = total, at

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in parameters:
            seen.saved[seen.at] += tensor.numel() * tensor.element_size()
        return tensor

    with ExitStack() as stack:
        for number, block in enumerate(blocks):
            enter, leave = _hooks(number, settle, seen)
            stack.callback(block.register_forward_pre_hook(enter).remove)
            stack.callback(block.register_forward_hook(leave).remove)
        for stack_of in stacks.values():
            stack.callback(stack_of.register_forward_pre_hook(partial(_route, seen)).remove)
        dataset = task.dataset()
        tell_epoch(dataset, 0)
        samples = [dataset[0]] * spec.batch.micro_size
        batch = placed(task.collate(samples), torch.device("meta"), DTYPE_OF[spec.precision])
        try:
            with counter, mode, torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
                caller(blueprint.model)(task.inputs(batch))
                settle(len(blocks))
        except (RuntimeError, NotImplementedError):
            return None
    return seen


def _route(seen: _Seen, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
    seen.routed[seen.at] += inputs[0].numel() * inputs[0].element_size()


def _hooks(
    number: int, settle: Callable[[int], None], seen: _Seen
) -> tuple[Callable[..., None], Callable[..., None]]:
    def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        settle(number)

    def leave(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        settle(number + 1)
        if isinstance(output, torch.Tensor):
            seen.boundary = max(seen.boundary, output.numel() * output.element_size())
            seen.positions = output.shape[POSITIONS] if output.ndim > POSITIONS else 0

    return enter, leave


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
