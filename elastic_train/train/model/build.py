"""Build the model on the meta device, allocate its memory, and initialise module by module where asked for.

Peak memory beyond the shards is one module then: each module that owns tensors is made whole, initialised
alone under a generator of its own, cut to this rank's shard, and freed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
import torch._dynamo  # the first optimizer loads it otherwise: seconds that no forming group should wait
from torch import nn
from torch.distributed.tensor import DTensor

from elastic_train.config import Precision
from elastic_train.errors import ConfigError
from elastic_train.geometry.fused import Run
from elastic_train.train.model.meta_build import NeedsValues, built_on_meta, check_tensors
from elastic_train.train.model.new_modules import check_new
from elastic_train.train.model.plain_build import DTYPE_OF, default_dtype, plainly
from elastic_train.train.model.tensor_names import NamedTensors, buffers_of, canonical, parameters_of
from elastic_train.train.model.user_hooks import TensorHooks, hooks_of
from elastic_train.train.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A model without memory. `constants` are tensors that the model's code gave values itself, `givers` (by
    path) are modules of other stages that initialise a tensor which is tied to one of this stage. Of `fused`
    tensors the rows are in another order here, the one in which tp cuts them."""

    model: nn.Module
    parameters: NamedTensors
    buffers: NamedTensors
    constants: Mapping[str, torch.Tensor]
    givers: tuple[tuple[str, nn.Module], ...] = ()
    fused: Mapping[str, tuple[Run, ...]] = field(default_factory=lambda: MappingProxyType({}))
    hooks: Mapping[str, TensorHooks] = field(default_factory=lambda: MappingProxyType({}))


def draw(task: Task, precision: Precision, seed: int = 0, *, values: bool = True) -> Blueprint:
    """Build the model on the meta device; for real, where its code needs values, and then without them.
    NeedsValues instead where there are to be no `values`.

    Modules stay in the mode that the code left them in, but for a model that is in evaluation mode as a
    whole, as libraries return those that they load.
    """
    dtype = DTYPE_OF[precision]
    model = built_on_meta(task.model, dtype, seed)
    real = model is None
    if model is None:
        if not values:
            raise NeedsValues
        model = plainly(task.model, dtype, seed)
    if not isinstance(model, nn.Module):
        raise ConfigError(field="task.model", problem=f"returned {type(model).__name__}, not an nn.Module.")
    check_new(model)
    if not model.training:
        model.train()
    parameters, buffers = parameters_of(model), buffers_of(model)
    check_tensors(model, {**tensors(parameters), **tensors(buffers)})
    constants: dict[str, torch.Tensor] = {}
    hooks = hooks_of(tensors(parameters))
    for kind in (parameters, buffers):
        for fqn, tensor in tensors(kind).items():
            if not tensor.is_meta:
                if not real:
                    constants[fqn] = tensor.detach()
                bare = _like(tensor, tensor.detach().to("meta"))
                if isinstance(tensor, nn.Parameter):
                    torch.utils.swap_tensors(tensor, bare)  # in place: optimizers of a loop hold it already
                else:
                    put(kind, fqn, bare)
    if not parameters.slots:
        raise ConfigError(field="task.model", problem="the model has no parameters.")
    return Blueprint(model=model, parameters=parameters, buffers=buffers, constants=constants, hooks=hooks)


def tensors(named: NamedTensors) -> dict[str, torch.Tensor]:
    """The tensors that hang in the slots now, by fqn."""
    return {fqn: getattr(slots[0].module, slots[0].name) for fqn, slots in named.slots.items()}


def put(named: NamedTensors, fqn: str, tensor: torch.Tensor) -> None:
    """Hang one tensor into all of its slots, so that ties stay ties."""
    for slot in named.slots[fqn]:
        setattr(slot.module, slot.name, tensor)  # not _parameters: recurrent layers keep a list in step


def allocate(blueprint: Blueprint, device: torch.device) -> None:
    """Give every tensor of the (divided) model memory on the device, without values."""
    for named in (blueprint.parameters, blueprint.buffers):
        for fqn, tensor in tensors(named).items():
            if isinstance(tensor, DTensor):
                local = torch.empty(tensor.to_local().shape, dtype=tensor.dtype, device=device)
                empty: torch.Tensor = DTensor.from_local(
                    local,
                    tensor.device_mesh,
                    tensor.placements,
                    run_check=False,
                    shape=tensor.shape,
                    stride=tensor.stride(),
                )
            else:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            put(named, fqn, _like(tensor, empty))


def initialise(
    blueprint: Blueprint,
    task: Task,
    *,
    precision: Precision,
    device: torch.device,
    shapes: Mapping[str, tuple[int, ...]],
    seeded: Callable[[str], AbstractContextManager[object]],
    cut: Callable[[torch.Tensor, torch.Tensor], None],
    chosen: Callable[[str], bool] = lambda fqn: True,
) -> None:
    """Give the tensors of the chosen modules their initial values: the same under every plan.

    `shapes` are the whole shapes by fqn, `seeded(fqn)` seeds the random generators, `cut(whole, shard)`
    copies this rank's part. A tied tensor gets the value that the module of its first name gives it.
    """
    first = {
        (id(slot.module), slot.name): fqn
        for named in (blueprint.parameters, blueprint.buffers)
        for fqn, slots in named.slots.items()
        for slot in slots
    }
    for path, module in (*blueprint.model.named_modules(), *blueprint.givers):
        fqn = canonical(path)
        own = [n for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None]
        if not own or not chosen(fqn):
            continue
        shards = {name: getattr(module, name) for name in own}
        # A giver's other tensors are not on this stage: they are made for its init and go nowhere.
        names = {name: first.get((id(module), name)) for name in own}
        sizes = {name: shapes[own] if own else tuple(shards[name].shape) for name, own in names.items()}
        with seeded(fqn), torch.no_grad(), default_dtype(DTYPE_OF[precision]), torch.device(device):
            for name, shard in shards.items():
                whole = torch.empty(sizes[name], dtype=shard.dtype, device=device)
                setattr(module, name, _like(shard, _untouched(whole)))
            if not all(names[name] in blueprint.constants for name in own):
                task.init(module, fqn)
            for name, shard in shards.items():
                if names[name] is None:
                    continue
                whole = blueprint.constants.get(names[name] or "")
                if whole is None:
                    whole = getattr(module, name)
                    _check_touched(whole, f"{fqn}.{name}" if fqn else name, module)
                # Its own name, not that of another module it is tied to: then it is this module's to give.
                if canonical(f"{path}.{name}" if path else name) == names[name]:
                    if tuple(whole.shape) != tuple(sizes[name]):
                        raise ConfigError(
                            field="task.init",
                            problem=f"changed the shape of {names[name]!r} to {tuple(whole.shape)}.",
                        )
                    runs = blueprint.fused.get(names[name] or "")
                    ordered = in_rank_order(whole.detach().to(device), runs)
                    cut(ordered, shard.detach())
        for name, shard in shards.items():
            setattr(module, name, shard)


def in_rank_order(whole: torch.Tensor, runs: tuple[Run, ...] | None) -> torch.Tensor:
    """A fused tensor with its rows in the order in which tp cuts them."""
    if runs is None:
        return whole
    return torch.cat([whole[run.logical : run.logical + run.length] for run in runs])


def _like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`new` as the kind of tensor that `old` is: a parameter or a buffer."""
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def _untouched(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with a value that no initialisation leaves, where the dtype has one."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    if tensor.dtype in (torch.int16, torch.int32, torch.int64):
        return tensor.fill_(torch.iinfo(tensor.dtype).min)
    return tensor.zero_()


def _check_touched(tensor: torch.Tensor, fqn: str, module: nn.Module) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        left = bool(tensor.isnan().any())
    elif tensor.dtype in (torch.int16, torch.int32, torch.int64):
        left = tensor.numel() > 0 and bool((tensor == torch.iinfo(tensor.dtype).min).any())
    else:
        left = False
    if left:
        raise ConfigError(
            field="task.init",
            problem=f"{fqn!r} of {type(module).__name__} has no value after its initialisation.",
            remedy="Set it in the module's reset_parameters(), or in init(module, fqn) of the task.",
        )
