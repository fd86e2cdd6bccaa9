"""Train a LightningModule on machines that come and go: `fit` in the place of Lightning's Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_train.lazy_names import lazily

if TYPE_CHECKING:
    from elastic_train.integrations.lightning.checkpoint_file import save_checkpoint
    from elastic_train.integrations.lightning.entry import fit, trainer

__all__ = ["fit", "save_checkpoint", "trainer"]

__getattr__, __dir__ = lazily(
    __name__, {"fit": "entry", "save_checkpoint": "checkpoint_file", "trainer": "entry"}
)
