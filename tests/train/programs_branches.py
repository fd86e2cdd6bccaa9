"""Models that call some of their parts, by their samples."""

from __future__ import annotations

import torch

from tests.train.programs import Net, of_model


class ChoosesBlock(Net):
    """One block for each micro-batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(h + self.blocks[int(x.sum() > 0)](h))


class CallsTheOccupied(Net):
    """Experts as modules, of which those are called that got rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        chosen = (x[:, 0] > 0.3).long()
        out = torch.zeros_like(h)
        for number, block in enumerate(self.blocks):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, block(h[rows]))
        return self.b(h + out)


class LooksAtValues(Net):
    """Chooses by its samples what it computes, and calls the same parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 0.5 if bool(x[0, 0] > 0) else x)


chooses_block = of_model(ChoosesBlock, "chooses_block")
calls_the_occupied = of_model(CallsTheOccupied, "calls_the_occupied")
looks_at_values = of_model(LooksAtValues, "looks_at_values")
