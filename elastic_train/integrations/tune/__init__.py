"""Search hyperparameters with Ray Tune, each trial an elastic run: `trainable` for its Tuner."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_train.integrations.tune.trial import checkpoint_url, trainable

__all__ = ["checkpoint_url", "trainable"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.trial"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
