"""A run goes on from DeepSpeed's checkpoint as it would have gone on in DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from tests.tasks.fixture_model import HIDDEN, LENGTH, VOCABULARY, Block

pytestmark = pytest.mark.ring2

BATCH = 8
UNINTERRUPTED = [4.738855, 4.667124, 4.713715, 4.790242]
"""Losses of steps 5 to 8 of the run that wrote z1, z2 and z3 after step 4, in DeepSpeed without a stop."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Model(nn.Module):
    """The model that wrote the checkpoints, of one head."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.h = nn.ModuleList([Block(), Block()])
        self.lnf, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens[:, :-1]) + self.pos.weight
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(self.lnf(x)).flatten(0, 1), tokens[:, 1:].flatten())


def resumed(checkpoint: Checkpoint) -> tuple[Model, torch.optim.AdamW]:
    """Model and optimizer from the checkpoint's tensors and its document alone."""
    model = Model()
    parameters = dict(model.named_parameters())
    kept = checkpoint.document["optimizer"]
    optimizer = torch.optim.AdamW(
        [
            {"params": [parameters[fqn] for fqn in group["params"]], **group["hyperparameters"]}
            for group in kept["groups"]
        ]
    )
    with torch.no_grad():
        for fqn, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(checkpoint.read(fqn, "param")))
            optimizer.state[parameter] = {
                "step": torch.tensor(kept["scalars"][fqn]["step"]["value"]),
                "exp_avg": torch.from_numpy(checkpoint.read(fqn, "exp_avg")),
                "exp_avg_sq": torch.from_numpy(checkpoint.read(fqn, "exp_avg_sq")),
            }
    return model, optimizer


@pytest.mark.parametrize("name", ["z1", "z2", "z3", "z3/global_step4_u"])
def test_the_next_losses_are_those_of_the_uninterrupted_run(deepspeed: Path, name: str) -> None:
    checkpoint = open_checkpoint(str(deepspeed / name))
    model, optimizer = resumed(checkpoint)
    clip = checkpoint.document["foreign"]["config"]["gradient_clipping"]
    losses: list[float] = []
    for step in range(checkpoint.document["step"], checkpoint.document["step"] + 4):
        drawn = torch.Generator().manual_seed(1000 + step)
        loss = model(torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=drawn))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    assert losses == pytest.approx(UNINTERRUPTED, abs=2e-6)
