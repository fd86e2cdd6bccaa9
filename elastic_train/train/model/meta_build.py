"""Build a model on the meta device, and check whether the result can stand for the real one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from elastic_train.errors import ConfigError, ElasticTrainError
from elastic_train.geometry.fragments import ITEM_BYTES
from elastic_train.train.model import rng
from elastic_train.train.model.plain_build import default_dtype, seed_as_a_script_does
from elastic_train.train.model.skip_init import SkipInit
from elastic_train.train.model.stray_tensors import strays
from elastic_train.train.model.user_hooks import without_memory

T = TypeVar("T")


class NeedsValues(Exception):
    """What is built on the meta device would not be what is built for real."""


def built_on_meta(build: Callable[[], nn.Module], dtype: torch.dtype, seed: int) -> nn.Module | None:
    """The model, without memory; None where its code needs values: it fails for want of them (`.item()`,
    `from_pretrained`), or uses them in a way that shows."""
    with rng.preserved(), default_dtype(dtype), torch.enable_grad(), torch.device("meta"), SkipInit():
        seed_as_a_script_does(seed)
        try:
            return without_values(build)
        except ElasticTrainError:
            raise
        except Exception:  # noqa: BLE001 - built for real it either works or raises what the person should see
            return None


def without_values(build: Callable[[], T]) -> T:
    """What `build` makes on the meta device. NeedsValues where it draws from torch's generator on the host,
    which has moved less than it would have, or keeps tensors without values in plain attributes or hooks."""
    before = torch.get_rng_state()
    made = build()
    if not torch.equal(before, torch.get_rng_state()):
        raise NeedsValues
    if isinstance(made, nn.Module):
        slots = {id(t) for kind in (made.parameters(), made.buffers()) for t in kind}
        if any(stray.tensor.is_meta and id(stray.tensor) not in slots for stray in strays(made)):
            raise NeedsValues
        if without_memory(made):
            raise NeedsValues
    return made


def check_tensors(model: nn.Module, named: Mapping[str, torch.Tensor]) -> None:
    """ConfigError for tensors that no plan could hold: their modules would go on with others."""
    known = {id(tensor): fqn for fqn, tensor in named.items()}
    for fqn, tensor in named.items():
        if isinstance(tensor, UninitializedTensorMixin):
            raise ConfigError(
                field=f"model.{fqn}",
                problem="has no shape before the model's first call.",
                remedy="Give its module all sizes: nn.Linear(inputs, outputs) for nn.LazyLinear(outputs).",
            )
        name = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout is not torch.strided or name not in ITEM_BYTES:
            kind = name if tensor.layout is torch.strided else f"{tensor.layout} {name}"
            raise ConfigError(
                field=f"model.{fqn}",
                problem=f"is {kind}, which cannot be divided and stored.",
                remedy=f"Use one of {', '.join(sorted(ITEM_BYTES))}; of a complex number its two parts, by "
                "torch.view_as_complex in forward.",
            )
        if tensor.is_complex() and tensor.requires_grad:
            raise ConfigError(
                field=f"model.{fqn}",
                problem=f"is {name}, and gradients of complex numbers are not reduced.",
                remedy="Make a parameter of its two parts, and the number of them by torch.view_as_complex "
                "in forward.",
            )
    for stray in strays(model):
        if id(stray.tensor) in known:
            raise ConfigError(
                field=f"model.{stray.path}",
                problem=f"is the tensor {known[id(stray.tensor)]!r} in a plain attribute, where it would "
                "stay as it is while the module's own is divided and restored.",
                remedy="Keep parameters in nn.ParameterList or nn.ParameterDict, or read them off their "
                "module.",
            )
