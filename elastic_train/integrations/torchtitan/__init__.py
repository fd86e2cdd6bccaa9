"""torchtitan: `trainer` takes a `Trainer.Config` of its, and trains that on machines that come and go.

How it is made. The config's model, optimizer groups and learning rates are built by torchtitan's own code, in
a `Task`; its training loop, its meshes, its checkpoint manager and its data loader are not used. How modules
may be cut is read off the sharding configs with which torchtitan itself cuts them. Written against torchtitan
0.3, which has configs in Python and none in TOML any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_train.lazy_names import lazily

if TYPE_CHECKING:
    from elastic_train.integrations.torchtitan.checkpoint_file import save_checkpoint
    from elastic_train.integrations.torchtitan.entry import trainer
    from elastic_train.integrations.torchtitan.names import specification

__all__ = ["save_checkpoint", "specification", "trainer"]

__getattr__, __dir__ = lazily(
    __name__, {"save_checkpoint": "checkpoint_file", "specification": "names", "trainer": "entry"}
)
