"""What is found out about sharded parameters before a run, on tensors without values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic_train.train.state.sharded_trial import sharding_fails
from tests.train import programs_unusual as unusual
from tests.train.programs import Fit, Net, of_model, spec

pytestmark = pytest.mark.ring2


class Rare(Net):
    """Drawn in place, and taken seldom."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        for block in self.blocks:
            if torch.empty(1).uniform_(0, 1).item() > 0.2:
                h = h + block(h)
        return self.b(h)


class Noisy(Net):
    """Draws, and calls everything whatever it drew."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        strength = 0.1 if torch.rand(()) < 0.5 else 0.2
        return super().forward(x + strength * torch.randn_like(x))


rare, noisy = of_model(Rare, "rare"), of_model(Noisy, "noisy")


@pytest.mark.parametrize("task", [unusual.stochastic_depth, unusual.layer_drop, rare])
def test_parts_that_are_called_by_chance_are_not_sharded(task: Any) -> None:
    reason = sharding_fails(task(), spec(4))
    assert reason is not None
    assert reason.startswith("forward calls 'blocks.")
    assert reason.endswith("by chance, and ranks draw different numbers")


@pytest.mark.parametrize("task", [Fit, noisy])
def test_chance_that_calls_the_same_parts_is_fine(task: Any) -> None:
    before = torch.get_rng_state()
    assert sharding_fails(task(), spec(4)) is None
    assert torch.equal(before, torch.get_rng_state())
