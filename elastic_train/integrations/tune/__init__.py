"""Search hyperparameters with Ray Tune, each trial an elastic run: `trainable` for its Tuner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_train.lazy_names import lazily

if TYPE_CHECKING:
    from elastic_train.integrations.tune.trial import checkpoint_url, trainable

__all__ = ["checkpoint_url", "trainable"]

__getattr__, __dir__ = lazily(__name__, {"checkpoint_url": "trial", "trainable": "trial"})
