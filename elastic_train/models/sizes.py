"""Sizes of the shipped language model: one dial from a laptop's test to a node's worth."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from elastic_train.errors import ConfigError

SizeName = Literal["nano", "tiny", "tiny_moe", "small", "base", "medium", "large"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Shape of a Llama-like causal language model."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int  # width of the feed-forward layer
    vocabulary: int = 264  # the byte tokenizer's 259, rounded up so that 2, 4 or 8 ranks split it evenly
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0  # on what attention and feed-forward add to the residual stream
    tied: bool = False  # the head uses the embedding's weight
    experts: int = (
        0  # feed-forward layers of width `hidden` beside each other in a block; 0: one for all tokens
    )
    experts_per_token: int = 2

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "kv_heads", "hidden", "vocabulary"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    field=f"model.{name}", problem=f"must be positive, got {getattr(self, name)}."
                )
        if self.dim % (2 * self.heads):
            raise ConfigError(
                field="model.heads",
                problem=f"dim {self.dim} does not divide into {self.heads} heads of even width.",
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                field="model.kv_heads", problem=f"{self.heads} heads do not share {self.kv_heads} evenly."
            )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ConfigError(
                field="model.experts_per_token",
                problem=f"must be in 1 to {self.experts} (experts), got {self.experts_per_token}.",
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(field="model.dropout", problem=f"must be in [0, 1), got {self.dropout}.")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


SIZES: dict[SizeName, LlamaConfig] = {
    "nano": LlamaConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden=96),
    "tiny": LlamaConfig(dim=64, layers=4, heads=4, kv_heads=2, hidden=192),
    "tiny_moe": LlamaConfig(dim=64, layers=4, heads=4, kv_heads=2, hidden=96, experts=8),
    "small": LlamaConfig(dim=256, layers=8, heads=8, kv_heads=4, hidden=704),
    "base": LlamaConfig(dim=768, layers=12, heads=12, kv_heads=4, hidden=2048),
    "medium": LlamaConfig(dim=1152, layers=24, heads=18, kv_heads=6, hidden=3408),
    "large": LlamaConfig(dim=2048, layers=22, heads=32, kv_heads=8, hidden=5632),
}


def size(name: str, *, dropout: float = 0.0, tied: bool = False) -> LlamaConfig:
    """The configuration of a named size."""
    for known, config in SIZES.items():
        if known == name:
            return replace(config, dropout=dropout, tied=tied)
    raise ConfigError(field="size", problem=f"{name!r} is none of {', '.join(SIZES)}.")
