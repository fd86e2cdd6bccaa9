"""The names of a Hugging Face model's parameters in the model's order, from its configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers


def parameter_names(config: Mapping[str, Any], *, most: int) -> list[str] | None:
    """The names as `named_parameters()` has them; None where transformers can't build the model from this, or
    where it would have over `most` layers or parts of another kind.

    It is built on the meta device: no weight is made, and no code that comes with a checkpoint is run.
    """
    kinds = config.get("architectures")
    kind = getattr(transformers, str(kinds[0]), None) if isinstance(kinds, list) and len(kinds) == 1 else None
    model_type = config.get("model_type")
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        return None
    if not isinstance(model_type, str) or _largest(config) > most:
        return None
    rest = {k: v for k, v in config.items() if k not in ("model_type", "architectures", "auto_map")}
    try:
        settings = transformers.AutoConfig.for_model(model_type, **rest)
        with torch.device("meta"):
            model = kind(settings)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError):
        return None
    return [name for name, _ in model.named_parameters()]


def _largest(config: Mapping[str, Any]) -> int:
    """The largest number of parts that a configuration asks for, and that takes time whatever their size."""
    counts = [0]
    for name, value in config.items():
        if isinstance(value, Mapping):
            counts.append(_largest(value))
        elif isinstance(value, int) and any(
            word in name for word in ("layer", "expert", "block", "depth", "stage")
        ):
            counts.append(value)
        elif isinstance(value, list):
            counts.append(len(value))
    return max(counts)
