"""Encode numbers, texts, small tensors and containers of them as JSON values, and decode them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

MOST = 1 << 16
"""Elements of a tensor that a document still holds."""


class Unstorable(TypeError):
    """What the value has that cannot be stored."""


def encoded(value: Any) -> dict[str, Any]:
    """Unstorable names the type of what it may not hold."""
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.numel() <= MOST:
        plain = value.detach()
        return {
            "tensor": plain.cpu().reshape(-1).tolist(),
            "dtype": str(plain.dtype).removeprefix("torch."),
            "shape": list(plain.shape),
            "device": plain.device.type,
        }
    if isinstance(value, Mapping) and all(isinstance(k, str | int) for k in value):
        return {"dict": [[k, encoded(v)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [encoded(v) for v in value]}
    if isinstance(value, torch.Tensor):
        raise Unstorable(f"a tensor of shape {list(value.shape)}")
    if isinstance(value, Mapping):
        raise Unstorable("a mapping with keys that are neither texts nor whole numbers")
    raise Unstorable(f"a {type(value).__name__}")


def decoded(value: Mapping[str, Any], device: torch.device) -> Any:
    """The value. Its tensors are on the device if they were on one."""
    if "tensor" in value:
        flat = torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
        return flat.reshape(value["shape"]).to("cpu" if value["device"] == "cpu" else device)
    ((kind, inner),) = value.items()
    match kind:
        case "dict":
            return {key: decoded(v, device) for key, v in inner}
        case "list":
            return [decoded(v, device) for v in inner]
        case "tuple":
            return tuple(decoded(v, device) for v in inner)
        case _:
            return inner
