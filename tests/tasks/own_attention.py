"""A model of a user's own under cp: learned places, groups of positions, a bidirectional attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_train.train.model.positions import own_positions, position_numbers
from elastic_train.train.task import Evaluation, Rules, Task

LENGTH, WORDS, DIM, HEADS = 8, 23, 12, 4


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Words, the group of each, and the word that each is to be told from the others of its group."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        words = torch.randint(WORDS, (LENGTH,), generator=drawn)
        groups = torch.randint(3, (LENGTH,), generator=drawn).sort().values
        return {"words": words, "groups": groups, "targets": words.flip(0)}


class Mix(nn.Module):
    """Attention within groups, in plain matrices; `dropout` of its weights."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, groups: Tensor) -> Tensor:
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key)
        apart = groups[:, None, :, None] != groups[:, None, None, :]
        weights = F.dropout(scores.masked_fill(apart, -torch.inf).softmax(-1), self.dropout, self.training)
        return torch.einsum("bhqk,bkhd->bqhd", weights, value)


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.inward, self.outward = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mix = Mix(dropout)

    def forward(self, x: Tensor, groups: Tensor) -> Tensor:
        heads = (t.unflatten(-1, (HEADS, -1)) for t in self.inward(self.norm(x)).chunk(3, -1))
        return x + self.outward(self.mix(*heads, groups).flatten(-2))


class Grouped(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.kinds, self.places = (nn.Embedding(n, DIM) for n in (WORDS, 3, LENGTH))
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(2))
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, words: Tensor, groups: Tensor) -> Tensor:
        """int64 [batch, positions] that are here, and the groups of all -> [batch, positions, WORDS]."""
        x = self.words(words) + self.places(position_numbers(words)) + self.kinds(own_positions(groups))
        for layer in self.layers:
            x = layer(x, groups)
        return self.head(x)


class GroupedTask(Task):
    """Measured in training and in evaluations, by sums and by all predictions together."""

    def model(self) -> nn.Module:
        return Grouped()

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named_params], lr=1e-2)

    def dataset(self) -> Sequences:
        return Sequences(31)

    def loss(self, output: Tensor, micro_batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        targets = own_positions(micro_batch["targets"])
        return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()

    def metrics(self, output: Tensor, micro_batch: dict[str, Tensor]) -> dict[str, Any]:
        ends = output[:, (0, -1)].logsumexp(-1)  # of the first position and the last: of two ranks
        return {"ends": ((ends[:, 0] * ends[:, 1]).sum(), len(ends))}

    def evaluation(self) -> Evaluation:
        return Evaluation(
            dataset=Sequences(7),
            metric=lambda output, _: {"spread": (output.std(1).sum(), len(output))},
            keep=lambda output, _: output.logsumexp((1, 2)),
            summary=lambda kept: {"most": kept.max()},
            every=2,
        )

    def parallelize(self) -> Rules:
        return Rules(attention=("layers.*.mix",))
