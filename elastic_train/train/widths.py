"""Sizes that parallel axes divide, as a model's configuration names them."""

from __future__ import annotations

from torch import nn

from elastic_train.planner.shape import Widths


def widths_of(model: nn.Module, sequence: int = 0) -> Widths:
    """In the words of this package or of Hugging Face; 0 for what the configuration doesn't name."""
    config = getattr(model, "config", None)

    def named(*names: str) -> int:
        return next((int(v) for n in names if isinstance(v := getattr(config, n, None), int)), 0)

    heads = named("heads", "num_attention_heads", "n_head")
    return Widths(
        hidden=named("dim", "hidden_size", "n_embd"),
        heads=heads,
        kv_heads=named("kv_heads", "num_key_value_heads") or heads,
        feed_forward=named("hidden", "intermediate_size"),
        sequence=sequence,
        vocabulary=named("vocabulary", "vocab_size"),
        experts=named("experts", "num_experts", "num_local_experts"),
    )
