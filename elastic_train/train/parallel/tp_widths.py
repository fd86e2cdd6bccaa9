"""Widths of a model that tensor parallelism has to divide: its attention heads."""

from __future__ import annotations

from torch import nn

from elastic_train.planner.model_shape import Widths


def widths_of(model: nn.Module) -> Widths:
    """As its configuration names them, in the words of this package or of Hugging Face; 0 if it doesn't."""
    config = getattr(model, "config", None)

    def named(*names: str) -> int:
        return next((int(v) for n in names if isinstance(v := getattr(config, n, None), int)), 0)

    heads = named("heads", "num_attention_heads", "n_head")
    return Widths(heads=heads, kv_heads=named("kv_heads", "num_key_value_heads") or heads)
