"""A small language model that every axis divides, with sizes that divide by nothing where they may."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from elastic_train.models.llama import Llama
from elastic_train.models.loss import next_token_loss
from elastic_train.models.sizes import LlamaConfig
from elastic_train.train.task import Evaluation, Rules, Task

VOCABULARY, LENGTH = 101, 6


class Numbered(torch.utils.data.Dataset[Tensor]):
    """Sequences of tokens by number."""

    def __init__(self, samples: int, *, length: int = LENGTH) -> None:
        self._samples, self._length = samples, length

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(VOCABULARY, (self._length,), generator=torch.Generator().manual_seed(index))


@dataclass
class ChainTask(Task):
    """Next tokens with the shipped model: four layers, one projection frozen, two parameter groups."""

    optimizer_name: str = "AdamW"
    settings: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2})
    samples: int = 31
    dropout: float = 0.1
    tied: bool = True
    kv_heads: int = 4
    hidden: int = 42
    experts: int = 0
    evaluate_every: int = 0
    length: int = LENGTH

    def model(self) -> nn.Module:
        config = LlamaConfig(
            dim=16,
            layers=4,
            heads=4,
            kv_heads=self.kv_heads,
            hidden=self.hidden,
            vocabulary=VOCABULARY,
            dropout=self.dropout,
            tied=self.tied,
            experts=self.experts,
        )
        model = Llama(config)
        feed_forward = model.layers[1].mlp
        (feed_forward.experts if self.experts else feed_forward).up.requires_grad_(False)  # type: ignore[union-attr]
        return model

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        parameters = [p for _, p in named_params]
        made = getattr(torch.optim, self.optimizer_name)
        matrices = {"params": [p for p in parameters if p.ndim > 1]}
        others = {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}
        return made([matrices, others], **self.settings)

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def dataset(self) -> Numbered:
        return Numbered(self.samples, length=self.length)

    def loss(self, output: Tensor, micro_batch: Tensor) -> tuple[Tensor, Tensor]:
        return next_token_loss(output, micro_batch, ignore_index=0)

    def evaluation(self) -> Evaluation | None:
        if not self.evaluate_every:
            return None
        return Evaluation(dataset=Numbered(7, length=self.length), every=self.evaluate_every)

    def parallelize(self) -> Rules:
        return Llama.rules(experts=self.experts > 0)
