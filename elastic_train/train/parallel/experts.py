"""Stacked experts, cut over the ranks of the ep axis, and the exchange of the rows they compute on.

A rank holds some of the experts and gets the rows that any rank of the axis has for them (Lepikhin et al.,
GShard, 2021, section 3). No row is dropped and no place is reserved: how many rows go where is exchanged
first. An expert gets its rows by source rank, and by their order there.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from elastic_train.errors import ConfigError
from elastic_train.train.model.build import Blueprint, put
from elastic_train.train.model.tensor_names import canonical
from elastic_train.train.task import Rules

EXPERT_SHARD = "expert_shard"
"""What ep leaves of the dp_shard axis: ranks that hold parts of the same experts."""


def find_experts(model: nn.Module, rules: Rules) -> dict[str, nn.Module]:
    """The modules that stack experts, by fqn; ConfigError where a pattern finds none, or no stack."""
    modules = [(canonical(path), module) for path, module in model.named_modules()]
    found: dict[str, nn.Module] = {}
    for pattern in rules.experts:
        matched = {fqn: module for fqn, module in modules if fnmatch.fnmatchcase(fqn, pattern)}
        if not matched:
            raise ConfigError(field="task.parallelize", problem=f"no module matches the experts {pattern!r}.")
        found |= matched
    for fqn, module in found.items():
        stacked = dict(module.named_parameters())
        lengths = {p.shape[0] if p.ndim else 0 for p in stacked.values()}
        if len(lengths) != 1 or len(stacked) != len(module._parameters) or list(module.buffers()):
            raise ConfigError(
                field="task.parallelize",
                problem=f"{fqn!r} does not stack experts: it must own nothing but parameters, all with one "
                "row per expert.",
            )
    return found


def number_of_experts(model: nn.Module, rules: Rules) -> int:
    """How many experts the ep axis has to divide, the greatest common number of all stacks; 0 without."""
    stacks = [next(module.parameters()).shape[0] for module in find_experts(model, rules).values()]
    return math.gcd(*stacks)


def check_experts(model: nn.Module, rules: Rules, ranks: int) -> dict[str, nn.Module]:
    """The stacks; ConfigError where `ranks` cannot divide them."""
    found = find_experts(model, rules)
    if not found:
        raise ConfigError(
            field="parallelism.ep",
            problem=f"nothing says which modules of {type(model).__name__} stack experts.",
            remedy="Name them with Rules(experts=...) in parallelize(), or use Parallelism(ep=1).",
        )
    experts = number_of_experts(model, rules)
    if experts % ranks:
        legal = [n for n in range(1, experts + 1) if experts % n == 0]
        raise ConfigError(
            field="parallelism.ep",
            problem=f"{ranks} ranks do not divide the model's {experts} experts.",
            remedy=f"Legal are {', '.join(map(str, legal))}.",
        )
    return found


def expert_mesh(mesh: DeviceMesh, shards: int, ranks: int) -> DeviceMesh:
    """The mesh with dp_shard, of `shards` ranks, divided into expert_shard and ep. Forms groups."""
    return mesh._unflatten("dp_shard", (shards // ranks, ranks), (EXPERT_SHARD, "ep"))


def cut_experts(blueprint: Blueprint, found: Container[str], mesh: DeviceMesh) -> list[nn.Module]:
    """Divide the meta model's stacks, in place, over a mesh of one axis; the modules that are here."""
    here: list[nn.Module] = []
    for path, module in blueprint.model.named_modules():
        if canonical(path) in found and not isinstance(module, nn.Identity):
            module.forward = _exchanging(module, module.forward, mesh.get_group())
            here.append(module)
    owned = {id(p) for module in here for p in module.parameters()}
    for fqn, slots in blueprint.parameters.slots.items():
        whole = getattr(slots[0].module, slots[0].name)
        if id(whole) not in owned:
            continue
        rows = whole.shape[0] // mesh.size()
        part = DTensor.from_local(
            torch.empty((rows, *whole.shape[1:]), dtype=whole.dtype, device="meta"),
            mesh,
            (Shard(0),),
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        put(blueprint.parameters, fqn, nn.Parameter(part, requires_grad=whole.requires_grad))
    return here


def _exchanging(
    module: nn.Module, forward: Callable[[Tensor, Tensor], Tensor], group: dist.ProcessGroup
) -> Callable[[Tensor, Tensor], Tensor]:
    """A forward for all experts, out of one for the experts that are here."""

    def run(rows: Tensor, counts: Tensor) -> Tensor:
        ranks = group.size()
        asked = torch.empty_like(counts)
        dist.all_to_all_single(asked, counts.contiguous(), group=group)
        asked = asked.view(ranks, -1)  # by source rank and own expert
        sent = counts.view(ranks, -1).sum(1).tolist()
        got = asked.sum(1).tolist()
        received = _exchange(rows, sent, got, group)
        order = _by_expert(asked)
        drawn = torch.get_rng_state()
        with _plain_parameters(module):
            computed = forward(received[order], asked.sum(0))
        if not torch.equal(drawn, torch.get_rng_state()):
            raise ConfigError(
                field="parallelism.ep",
                problem=f"{type(module).__name__} draws random numbers for the rows that are here, which "
                "depend on the plan.",
                remedy="Move the dropout behind the experts, or use Parallelism(ep=1).",
            )
        return _exchange(computed[order.argsort()], got, sent, group)

    return run


def _by_expert(asked: Tensor) -> Tensor:
    """Rows come by source rank and then by expert: which of them in which order are those of each expert."""
    experts = torch.arange(asked.shape[1], device=asked.device).repeat(asked.shape[0])
    return experts.repeat_interleave(asked.flatten()).argsort(stable=True)


@contextmanager
def _plain_parameters(module: nn.Module) -> Iterator[None]:
    """The module sees the experts that are here as plain tensors."""
    kept = dict(module._parameters)
    for name, value in kept.items():
        if isinstance(value, DTensor):
            module._parameters[name] = value.to_local()  # type: ignore[assignment]
    try:
        yield
    finally:
        module._parameters.update(kept)


class _Exchange(torch.autograd.Function):
    """Rows to other ranks and theirs to this one, gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (sent, got), group
        return _exchanged(rows, sent, got, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, got = ctx.sizes
        return _exchanged(gradients[0], got, sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
    return _Exchange.apply(rows, sent, got, group)  # type: ignore[return-value]


def _exchanged(rows: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty((sum(got), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), got, sent, group=group)
    return received
