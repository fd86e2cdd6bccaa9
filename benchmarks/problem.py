"""The training problem of the benchmarks, the same for all systems: a small Llama on made-up tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import elastic_train as et
from elastic_train.models.llama import Llama
from elastic_train.models.loss import next_token_loss
from elastic_train.models.sizes import size

LEARNING_RATE = 1e-3


class Tokens(torch.utils.data.Dataset[Tensor]):
    """Sequences of made-up tokens, held in memory: loading costs nothing that could be compared."""

    draws_nothing = True

    def __init__(self, *, length: int, seq_len: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(1, 256, (length, seq_len), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self._tokens[index]


@dataclass(frozen=True, kw_only=True)
class Problem(et.Task):
    """Next-token prediction with AdamW."""

    size: str = "tiny"
    seq_len: int = 64
    samples: int = 4096

    def model(self) -> nn.Module:
        return Llama(size(self.size))

    def optimizer(self, named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named_params], lr=LEARNING_RATE)

    def dataset(self) -> Tokens:
        return Tokens(length=self.samples, seq_len=self.seq_len)

    def loss(self, output: Tensor, micro_batch: Tensor) -> tuple[Tensor, Tensor]:
        return next_token_loss(output, micro_batch)

    def parallelize(self) -> et.Rules:
        return Llama.rules()
