"""Train a LightningModule on machines that come and go: `fit` in the place of Lightning's Trainer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_train.integrations.lightning.checkpoint_file import save_checkpoint
    from elastic_train.integrations.lightning.entry import fit, trainer

__all__ = ["fit", "save_checkpoint", "trainer"]

_HOMES = {"fit": "entry", "save_checkpoint": "checkpoint_file", "trainer": "entry"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
