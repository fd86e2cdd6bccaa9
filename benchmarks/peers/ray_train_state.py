"""What a Ray Train worker holds, restored and saved as Ray Train's documentation recommends.

Every rank reads `get_checkpoint` when it starts; rank 0 writes a directory and gives it to `report`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.problem import LEARNING_RATE, Problem


class Replica:
    """The model of one rank and its optimizer, from the last checkpoint. Inside a train loop only."""

    def __init__(self, problem: Problem) -> None:
        import torch
        from ray import train
        from ray.train.torch import prepare_model

        context = train.get_context()
        self.rank, self.world = context.get_world_rank(), context.get_world_size()
        torch.set_num_threads(1)
        self.model: Any = prepare_model(problem.model())
        self._bare = self.model.module if self.world > 1 else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.step, checkpoint = 0, train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as directory:
                saved = torch.load(Path(directory) / "state.pt")
            self._bare.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step = saved["step"]

    def report(self, step: int) -> None:
        """Save the state after a step. All ranks call it."""
        import torch
        from ray import train

        if self.rank > 0:
            train.report({"step": step})
            return
        with tempfile.TemporaryDirectory() as directory:
            optimizer = self.optimizer.state_dict()
            state = {"model": self._bare.state_dict(), "optimizer": optimizer, "step": step}
            torch.save(state, Path(directory) / "state.pt")
            train.report({"step": step}, checkpoint=train.Checkpoint.from_directory(directory))
