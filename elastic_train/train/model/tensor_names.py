"""Fully qualified names of tensors: what wrappers add is taken away, what ties share is named once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from torch import nn

from elastic_train.errors import ConfigError

WRAPPERS = frozenset({"_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Path parts that torch.compile, DDP, activation checkpointing and FSDP1 put into names."""

NAMES_KEPT = 1 << 16  # every step asks for those of all modules


@lru_cache(maxsize=NAMES_KEPT)
def canonical(name: str) -> str:
    """The name without the parts that wrappers added, in any order and at any depth."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def canonical_all(names: Iterable[str]) -> dict[str, str]:
    """Name -> canonical name. Two names that become one raise a ConfigError."""
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in names:
        short = canonical(name)
        if short in taken and taken[short] != name:
            raise ConfigError(
                field="model",
                problem=f"{taken[short]!r} and {name!r} are both {short!r} without the wrappers' parts.",
                remedy="Rename one of the two modules.",
            )
        taken[short] = name
        found[name] = short
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A place in a module where a tensor hangs. Tied tensors hang in several."""

    module: nn.Module
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensors:
    """The parameters of a model, or its buffers, by canonical fqn, in the order of the model.

    `aliases` maps the further names of a tied tensor to the first, under which alone it is stored.
    """

    slots: dict[str, tuple[Slot, ...]]
    aliases: dict[str, str]


def parameters_of(model: nn.Module) -> NamedTensors:
    return _named(model, "_parameters")


def buffers_of(model: nn.Module) -> NamedTensors:
    """Persistent and other buffers."""
    return _named(model, "_buffers")


def _named(model: nn.Module, kind: str) -> NamedTensors:
    slots: dict[str, tuple[Slot, ...]] = {}
    aliases: dict[str, str] = {}
    owner: dict[int, str] = {}
    modules = list(model.named_modules(remove_duplicate=False))
    raw = [f"{path}.{name}" if path else name for path, module in modules for name in getattr(module, kind)]
    short = canonical_all(raw)
    for path, module in modules:
        for name, tensor in getattr(module, kind).items():
            if tensor is None:
                continue
            fqn = short[f"{path}.{name}" if path else name]
            first = owner.setdefault(id(tensor), fqn)
            slot = Slot(module=module, name=name)
            if first != fqn:
                aliases[fqn] = first
                if slot in slots[first]:
                    continue
            slots[first] = (*slots.get(first, ()), slot)
    return NamedTensors(slots=slots, aliases=aliases)
