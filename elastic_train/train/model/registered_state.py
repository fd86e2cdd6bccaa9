"""Objects with `state_dict` and `load_state_dict` that a loop registered, captured at each step.

Its tensors are copied into tensors of ours, which are fragments like a model's buffers. What is no tensor is
JSON in the document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from elastic_train.errors import ConfigError
from elastic_train.geometry.fragments import ITEM_BYTES
from elastic_train.train.model.loss_scale import check_no_scaler
from elastic_train.train.model.lr_schedule import check_functions

VALUES = (bool, int, float, str)


@dataclass(slots=True, kw_only=True, eq=False)
class Registered:
    """Tensors by "name.path", and by name what says where they and the scalars belong."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    scalars: dict[str, Any] = field(default_factory=dict[str, Any])
    things: list[str] = field(default_factory=list[str])
    generators: dict[str, Any] = field(
        default_factory=dict[str, Any]
    )  # after each model, for a loop that draws
    schedules: bool = False  # whether a learning rate scheduler is among them

    def reserve(self, name: str, thing: Any) -> None:
        """Memory for the tensors of a thing, cut as they are."""
        found: dict[str, torch.Tensor] = {}
        _encode(thing.state_dict(), name, found)
        for path, tensor in found.items():
            check_dtype(f"ctx.register({name!r})", path, tensor)
        self.things.append(name)
        self.tensors |= {path: torch.zeros_like(tensor.detach()) for path, tensor in found.items()}
        self.schedules |= isinstance(thing, LRScheduler)

    def capture(self, name: str, thing: Any) -> None:
        """Keep the state of a thing as it is now."""
        found: dict[str, torch.Tensor] = {}
        scalars = _encode(thing.state_dict(), name, found)
        own = {path: (t.dtype, t.shape) for path, t in self.tensors.items() if _belongs(path, name)}
        now = {path: (tensor.dtype, tensor.shape) for path, tensor in found.items()}
        if own != now:
            odd = sorted(path for path in own.keys() | now.keys() if own.get(path) != now.get(path))
            raise ConfigError(
                field=f"ctx.register({name!r})",
                problem=f"its tensor {odd[0]!r} came, went or changed its shape or dtype while it trained.",
                remedy="Make all tensors of a registered state before the first batch.",
            )
        for path, tensor in found.items():
            self.tensors[path].copy_(tensor.detach())
        self.scalars[name] = scalars

    def restore(self, name: str, thing: Any) -> None:
        """Give a thing the state that is kept of it."""
        if name not in self.scalars:
            return
        thing.load_state_dict(_decoded(self.scalars[name], self.tensors))


def check_dtype(field: str, path: str, tensor: torch.Tensor) -> None:
    """ConfigError for a tensor that cannot be stored."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided or dtype not in ITEM_BYTES:
        raise ConfigError(
            field=field,
            problem=f"its tensor {path!r} is {tensor.layout} {tensor.dtype}, which cannot be stored.",
            remedy=f"Use a dense tensor of {', '.join(sorted(ITEM_BYTES))}; of a complex128 its two parts.",
        )


def check_registered(name: str, thing: Any) -> None:
    check_no_scaler(name, thing)
    if not (callable(getattr(thing, "state_dict", None)) and hasattr(thing, "load_state_dict")):
        raise ConfigError(
            field=f"ctx.register({name!r})",
            problem=f"{type(thing).__name__} has no state_dict() and load_state_dict().",
        )
    check_functions(thing, f"ctx.register({name!r})")


def _belongs(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON that tells one kind of container from another; tensors go into `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {"dict": [[_key(k, path), _encode(v, f"{path}.{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        if all(
            v is None or isinstance(v, VALUES) for v in value
        ):  # a history, a buffer: as small as it can be
            return {f"{kind} of values": list(value)}
        return {kind: [_encode(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]}
    if value is None or isinstance(value, VALUES):
        return {"value": value}
    raise ConfigError(
        field=f"ctx.register({path.split('.')[0]!r})",
        problem=f"its state_dict() has a {type(value).__name__} at {path!r}, which cannot be stored.",
        remedy="Keep tensors, numbers, texts, and lists and mappings of them.",
    )


def _key(key: object, path: str) -> str | int:
    if isinstance(key, str | int):
        return key
    raise ConfigError(
        field=f"ctx.register({path.split('.')[0]!r})",
        problem=f"its state_dict() has a key of type {type(key).__name__} at {path!r}.",
        remedy="Use texts or whole numbers.",
    )


def _decoded(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    ((kind, inner),) = value.items()
    match kind:
        case "tensor":
            return tensors[inner].detach().clone()
        case "dict":
            return {key: _decoded(v, tensors) for key, v in inner}
        case "list of values":
            return list(inner)
        case "tuple of values":
            return tuple(inner)
        case "list":
            return [_decoded(v, tensors) for v in inner]
        case "tuple":
            return tuple(_decoded(v, tensors) for v in inner)
        case _:
            return inner
