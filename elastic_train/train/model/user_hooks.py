"""Carry the job's hooks on parameters and modules over to their shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from elastic_train.errors import ConfigError
from elastic_train.train.model.tensor_names import canonical

_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHooks:
    """Called with a gradient, and after one was accumulated."""

    gradient: tuple[Callable[..., Any], ...]
    accumulated: tuple[Callable[..., Any], ...]


def hooks_of(tensors: Mapping[str, torch.Tensor], *, engines: bool = True) -> dict[str, TensorHooks]:
    """Of those that have any; without the `engines` those of a job's code alone."""
    found: dict[str, TensorHooks] = {}
    for fqn, tensor in tensors.items():
        gradient, accumulated = (
            tuple(h for h in (getattr(tensor, kind) or {}).values() if engines or not _is_ours(h))
            for kind in _OF_TENSORS
        )
        if gradient or accumulated:
            found[fqn] = TensorHooks(gradient=gradient, accumulated=accumulated)
    return found


def _is_ours(hook: Any) -> bool:
    return type(hook).__module__.startswith("elastic_train.")


def hang(hooks: Mapping[str, TensorHooks], parameters: Mapping[str, torch.Tensor]) -> None:
    """Put them on the shards. ConfigError where a hook would see a part of a gradient, or none."""
    for fqn, own in hooks.items():
        parameter = parameters.get(fqn)
        if parameter is None:
            continue  # of another stage
        check_whole(fqn, parameter)
        for hook in own.gradient:
            parameter.register_hook(hook)
        for hook in own.accumulated:
            parameter.register_post_accumulate_grad_hook(hook)


def check_whole(fqn: str, parameter: torch.Tensor) -> None:
    """ConfigError where a parameter with a hook is cut."""
    if isinstance(parameter, DTensor):
        raise ConfigError(
            field=f"model.{fqn}",
            problem="has a hook on its gradient, which is called for whole gradients, and here it is cut.",
            remedy="Keep parameters whole, with Parallelism(dp_shard=1, tp=1), or use a hook of the module "
            "(register_full_backward_hook).",
        )


def without_memory(model: nn.Module) -> bool:
    """Whether a hook holds on to a tensor that has no values."""
    of_tensors = hooks_of(dict(model.named_parameters())).values()
    hooks = [hook for own in of_tensors for hook in (*own.gradient, *own.accumulated)]
    for module in model.modules():
        hooks += [hook for kind in _OF_MODULES for hook in getattr(module, kind).values()]
    held = [cell.cell_contents for hook in hooks for cell in getattr(hook, "__closure__", None) or ()]
    return any(isinstance(value, torch.Tensor) and value.is_meta for value in held)


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Code that is run several times may add hooks inside: they are gone afterwards."""
    kept = keys_of_hooks(model)
    try:
        yield
    finally:
        take_away(model, kept)


def take_away(model: nn.Module, kept: Mapping[tuple[int, str], frozenset[int]]) -> None:
    """All hooks but those."""
    for owner, kind in _places(model):
        hooks = getattr(owner, kind)
        for key in [key for key in hooks or () if key not in kept.get((id(owner), kind), ())]:
            del hooks[key]


def keys_of_hooks(model: nn.Module) -> dict[tuple[int, str], frozenset[int]]:
    """The keys of all hooks of a model, by what they hang on and their kind."""
    return {(id(owner), kind): frozenset(getattr(owner, kind) or ()) for owner, kind in _places(model)}


def _places(model: nn.Module) -> Iterator[tuple[Any, str]]:
    for module in model.modules():
        yield from ((module, kind) for kind in _OF_MODULES)
    for parameter in model.parameters():
        yield from ((parameter, kind) for kind in _OF_TENSORS)


def structure_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """By path, which module stands there, and how many hooks it and its parameters have."""
    return {
        canonical(path): (
            id(module),
            *(len(vars(module).get(kind) or ()) for kind in _OF_MODULES),
            sum(len(p._backward_hooks or ()) for p in module.parameters(recurse=False)),
        )
        for path, module in model.named_modules()
    }


def check_structure(before: Mapping[str, tuple[int, ...]], model: nn.Module) -> None:
    """ConfigError where a loop changed what its models are made of since its first batch."""
    now = structure_of(model)
    for path in sorted(before.keys() | now.keys()):
        was, found = before.get(path), now.get(path)
        if was == found:
            continue
        whole = was is None or found is None or was[0] != found[0]
        what = "this module" if whole else "the hooks of this module"
        raise ConfigError(
            field=f"model.{path}",
            problem=f"the loop changed {what} while it trains, and would do so again, or never, whenever it "
            "is entered anew.",
            remedy="Make modules and register hooks before the first batch, and let what happens at a step "
            "depend on an attribute.",
        )
