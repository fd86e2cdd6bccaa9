"""The names of a Hugging Face model's parameters in the model's order, from its configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def parameter_names(config: Mapping[str, Any]) -> list[str] | None:
    """The names as `named_parameters()` has them; None where transformers can't build the model from this.

    It is built on the meta device: no weight is made, and no code that comes with a checkpoint is run.
    """
    import transformers

    kinds = config.get("architectures")
    kind = getattr(transformers, str(kinds[0]), None) if isinstance(kinds, list) and len(kinds) == 1 else None
    model_type = config.get("model_type")
    if kind is None or not isinstance(model_type, str):
        return None
    rest = {k: v for k, v in config.items() if k not in ("model_type", "architectures", "auto_map")}
    try:
        settings = transformers.AutoConfig.for_model(model_type, **rest)
        with torch.device("meta"):
            model = kind(settings)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError):
        return None
    return [name for name, _ in model.named_parameters()]
