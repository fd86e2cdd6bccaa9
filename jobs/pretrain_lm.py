"""Pretrain a small Llama-like language model on text.

python jobs/pretrain_lm.py --max-steps 40
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from ray.train import RunConfig, ScalingConfig
from torch import Tensor, nn

import elastic_train as et
from elastic_train.data.documents import documents_of
from elastic_train.data.numbered import NumberedSamples
from elastic_train.data.packing import Packed
from elastic_train.data.parquet import ParquetText
from elastic_train.data.sample_range import SourcePart
from elastic_train.data.stdlib import StandardLibrary
from elastic_train.data.text import TextFiles
from elastic_train.models.llama import Llama
from elastic_train.models.loss import next_token_loss
from elastic_train.models.sizes import size as model_size

HELD_OUT = 64  # windows at the end of the data that are evaluated and never trained


@dataclass(frozen=True, kw_only=True)
class Pretrain(et.Task):
    """Next-token prediction on bytes. `packed`: attention and predictions stay within a document."""

    size: str
    data: str
    seq_len: int
    lr: float
    dropout: float
    tied: bool
    packed: bool
    max_steps: int
    evaluate_every: int

    def model(self) -> nn.Module:
        return Llama(model_size(self.size, dropout=self.dropout, tied=self.tied))

    def optimizer(self, named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        parameters = [parameter for _, parameter in named_params]
        decayed = {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1}
        plain = {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}
        return torch.optim.AdamW([decayed, plain], lr=self.lr, betas=(0.9, 0.95))

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Linear warm-up over a twentieth of the run, then a cosine down to a tenth of the rate."""
        warm_up = max(1, self.max_steps // 20)

        def factor(steps: int) -> float:
            done = min(1.0, max(0, steps - warm_up) / max(1, self.max_steps - warm_up))
            return min(1.0, (steps + 1) / warm_up) * (0.55 + 0.45 * math.cos(math.pi * done))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def dataset(self) -> NumberedSamples:
        return SourcePart(self._text(), stop=-HELD_OUT) if self.evaluate_every else self._text()

    def loss(self, output: Tensor, micro_batch: Any) -> tuple[Tensor, Tensor]:
        if self.packed:
            return next_token_loss(output, micro_batch["tokens"], micro_batch["documents"])
        return next_token_loss(output, micro_batch)

    def parallelize(self) -> et.Rules:
        return Llama.rules(packed=self.packed, experts=model_size(self.size).experts > 0)

    def evaluation(self) -> et.Evaluation | None:
        if not self.evaluate_every:
            return None
        return et.Evaluation(dataset=SourcePart(self._text(), start=-HELD_OUT), every=self.evaluate_every)

    def _text(self) -> NumberedSamples:
        places, table = self.data or StandardLibrary(), self.data.endswith(".parquet")
        if self.packed:
            return Packed(documents_of(places), seq_len=self.seq_len)
        return (ParquetText if table else TextFiles)(places, seq_len=self.seq_len)


def trainer(
    *,
    size: str = "tiny",
    data: str = "",
    seq_len: int = 64,
    global_size: int = 12,
    micro_size: int = 2,
    max_steps: int = 200,
    lr: float = 3e-3,
    dropout: float = 0.0,
    tied: bool = False,
    packed: bool = False,
    seed: int = 0,
    evaluate_every: int = 0,
    workers: str = "1:3",
    storage: str = "./runs",
    name: str = "pretrain_lm",
) -> et.ElasticTrainer:
    """Pretrain a small language model on text files, Parquet text, or the standard library's own source."""
    least, _, most = workers.partition(":")
    return et.ElasticTrainer(
        Pretrain(
            size=size,
            data=data,
            seq_len=seq_len,
            lr=lr,
            dropout=dropout,
            tied=tied,
            packed=packed,
            max_steps=max_steps,
            evaluate_every=evaluate_every,
        ),
        batch=et.Batch(global_size=global_size, micro_size=micro_size, seed=seed),
        max_steps=max_steps,
        clip_norm=1.0,
        scaling_config=ScalingConfig(num_workers=(int(least), int(most or least))),
        run_config=RunConfig(name=name, storage_path=storage),
    )


if __name__ == "__main__":
    et.main(trainer)
