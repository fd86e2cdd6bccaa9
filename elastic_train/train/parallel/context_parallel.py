"""Context parallelism: each cp rank computes on a part of the positions, and attention on some of the heads.

DeepSpeed-Ulysses: Jacobs et al., 2023, section 3.1. In front of attention an all-to-all gives each rank all
positions of its heads, behind it another one gives it its positions of all heads. In between nothing but
heads is divided, so attention, masks and rotary embeddings are those of one process, whatever kernel computes
them. Backward sends gradients the other way.

The loss is a sum over the positions that are here, and every gradient a part of a sum over the ranks. Stages
give each other whole activations, so a log of them serves any plan.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _NormBase

from elastic_train.errors import ConfigError
from elastic_train.planner.model_shape import Widths
from elastic_train.planner.plan import Mesh
from elastic_train.train.collectives.gradient_reduction import CONTEXT_SHARD
from elastic_train.train.model.build import Blueprint
from elastic_train.train.model.dropout import Slice
from elastic_train.train.model.positions import POSITIONS, part_of
from elastic_train.train.model.rng import drawn_so_far
from elastic_train.train.model.tensor_names import canonical
from elastic_train.train.parallel.sequence_parallel import hand_on_all_positions, slice_positions
from elastic_train.train.parallel.tp_widths import widths_of
from elastic_train.train.task import Rules

HEADS = 2
"""The dim of queries, keys and values that is divided within attention."""


def find_attention(model: nn.Module, rules: Rules) -> dict[str, nn.Module]:
    """The modules in which positions meet, by fqn; ConfigError where a pattern finds none, or weights."""
    found: dict[str, nn.Module] = {}
    modules = [(canonical(path), module) for path, module in model.named_modules()]
    for pattern in rules.attention:
        matched = {fqn: module for fqn, module in modules if fnmatch.fnmatchcase(fqn, pattern)}
        if not matched:
            raise ConfigError(
                field="task.parallelize", problem=f"no module matches the attention {pattern!r}."
            )
        found |= matched
    for fqn, module in found.items():
        if next(module.parameters(), None) is not None:
            raise ConfigError(
                field="task.parallelize",
                problem=f"the attention {fqn!r} has parameters, and computes on some of the heads.",
                remedy="Name the module that is given query, key and value, with the projections outside.",
            )
    return found


def check_context(model: nn.Module, rules: Rules, size: Mesh) -> Collection[str]:
    """The modules in which positions meet, by fqn; ConfigError where cp cannot divide the model."""
    found = find_attention(model, rules)
    if not found:
        raise ConfigError(
            field="parallelism.cp",
            problem=f"nothing says in which modules of {type(model).__name__} positions meet.",
            remedy="Name what is given query, key and value with Rules(attention=...) in parallelize(), or "
            "use Parallelism(cp=1).",
        )
    if size.ep > 1:
        raise ConfigError(
            field="parallelism.ep",
            problem="experts move between ranks that have whole sequences, and cp divides those.",
            remedy="Use Parallelism(cp=1) or Parallelism(ep=1).",
        )
    for path, module in model.named_modules():
        if isinstance(module, _NormBase):
            raise ConfigError(
                field="parallelism.cp",
                problem=f"{canonical(path)!r} is a {type(module).__name__}, which normalises over positions.",
                remedy="Use a norm of each position, as LayerNorm or RMSNorm, or Parallelism(cp=1).",
            )
    widths, tp = widths_of(model), size.tp
    problem = widths.heads_problem(tp, size.cp)
    if problem:
        legal = [n for n in range(1, widths.heads // tp + 1) if not widths.heads_problem(tp, n)]
        raise ConfigError(
            field="parallelism.cp",
            problem=f"{problem}.",
            remedy=f"Legal are {', '.join(map(str, legal))}.",
        )
    return found.keys()


def cut_context(
    blueprint: Blueprint,
    attention: Collection[str],
    mesh: DeviceMesh,
    device: torch.device,
    *,
    first: bool,
    last: bool,
) -> None:
    """Give the model a part of the positions, and its attention all of them for some heads.

    `attention` is what `check_context` found in the whole model. To be called after `cut_positions`, which
    divides this part over tp. Whole activations go in and out at the ends of a stage.
    """
    group = mesh.get_group()
    part = Slice(mesh.get_local_rank(), mesh.size())
    model = blueprint.model
    for path, module in model.named_modules():
        if (fqn := canonical(path)) in attention:
            module.forward = _exchanging(module.forward, fqn, group, device)
    if first:
        model.register_forward_pre_hook(_divided_input(model, part), prepend=True, with_kwargs=True)
    else:
        model.register_forward_pre_hook(partial(_divided_activation, part, group), prepend=True)
    if not last:
        hand_on_all_positions(model, group)


def shard_mesh(mesh: DeviceMesh, copies: Sequence[str]) -> DeviceMesh:
    """Over which FSDP2 cuts: the ranks of dp_shard and cp as one axis, behind `copies`. Forms a group."""
    both = mesh["dp_shard", "cp"]._flatten(CONTEXT_SHARD)
    return DeviceMesh._concatenate([mesh[*copies], both]) if copies else both


def _divided_input(model: nn.Module, part: Slice) -> Callable[..., Any]:
    """The first argument of forward is divided; what else the model is given stays whole."""
    name = next(iter(inspect.signature(model.forward).parameters))

    def hook(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        whole = inputs[0] if inputs else named.get(name)
        if not isinstance(whole, Tensor) or whole.ndim <= POSITIONS:
            raise ConfigError(
                field="parallelism.cp",
                problem=f"the model's first argument {name!r} is no tensor [batch, positions, ...].",
                remedy="Return one from inputs(), or use Parallelism(cp=1).",
            )
        here = part_of(whole, part).contiguous()
        return ((here, *inputs[1:]), named) if inputs else (inputs, named | {name: here})

    return hook


def _divided_activation(
    part: Slice, group: dist.ProcessGroup, _: nn.Module, inputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Of what an earlier stage handed on."""
    part_of(inputs[0], part)  # refuses what does not divide
    return slice_positions(inputs[0], group), *inputs[1:]


def _exchanging(
    forward: Callable[..., Tensor], fqn: str, group: dist.ProcessGroup, device: torch.device
) -> Callable[..., Tensor]:
    """Attention for the positions that are here, out of one for the heads that are here."""
    ranks = group.size()

    def refuse(problem: str, remedy: str) -> NoReturn:
        raise ConfigError(
            field="parallelism.cp", problem=problem, remedy=f"{remedy}, or use Parallelism(cp=1)."
        )

    def run(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Tensor:
        heads, kv_heads = query.shape[HEADS], key.shape[HEADS]
        problem = Widths(heads=heads, kv_heads=kv_heads).heads_problem(1, ranks)
        if problem or value.shape[HEADS] != kv_heads:
            shapes = ", ".join(str(list(t.shape)) for t in (query, key, value))
            refuse(
                f"{fqn!r} is given {shapes} as query, key and value [batch, positions, heads, size]: "
                f"{problem or 'keys and values have unlike heads'}.",
                "Have as many heads as the ranks divide",
            )
        if kv_heads < ranks:
            key, value = (t.repeat_interleave(ranks // kv_heads, HEADS) for t in (key, value))
        query, key, value = (_exchange(t, POSITIONS, HEADS, group) for t in (query, key, value))
        drawn = drawn_so_far(device)
        mixed = forward(query, key, value, *rest, **named)
        if not torch.equal(drawn, drawn_so_far(device)):
            refuse(
                f"{fqn!r} draws random numbers for the heads that are here, which depend on the plan.",
                "Move the dropout behind the attention",
            )
        if mixed.shape[: HEADS + 1] != query.shape[: HEADS + 1]:
            refuse(
                f"{fqn!r} gives {list(mixed.shape)} for a query {list(query.shape)}.",
                "Return [batch, positions, heads, size]",
            )
        return _exchange(mixed, HEADS, POSITIONS, group)

    return run


def _exchange(part: Tensor, gathered: int, divided: int, group: dist.ProcessGroup) -> Tensor:
    return _Exchange.apply(part, gathered, divided, group)  # type: ignore[return-value]


class _Exchange(torch.autograd.Function):
    """All of dim `gathered` for a part of dim `divided`; gradients the other way."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, gathered: int, divided: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dims, ctx.group = (gathered, divided), group
        return _exchanged(part, gathered, divided, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gathered, divided = ctx.dims
        return _exchanged(gradients[0], divided, gathered, ctx.group), None, None, None


def _exchanged(part: Tensor, gathered: int, divided: int, group: dist.ProcessGroup) -> Tensor:
    sent = torch.stack(part.chunk(group.size(), divided)).contiguous()  # a stack keeps strides of its parts
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), gathered)
