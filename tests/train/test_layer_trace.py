"""What a traced micro-batch says of a layer is what real tensors need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import elastic_train as et
from elastic_train.config import Precision, RunSpec
from elastic_train.models.llama import Llama
from elastic_train.models.loss import next_token_loss
from elastic_train.models.sizes import LlamaConfig
from elastic_train.train.layer_trace import CPU, LiveBytes, Trace, trace_layers
from elastic_train.train.model.build import draw
from elastic_train.train.model.weight_casts import cast_again
from elastic_train.train.parallel.parallelize import compute_in

pytestmark = pytest.mark.ring1

BLOCKS, SEQUENCE, MICRO = 3, 256, 2
CONFIG = LlamaConfig(dim=64, layers=BLOCKS, heads=4, kv_heads=2, hidden=192, vocabulary=512)
SAMPLE = torch.arange(SEQUENCE) % 500


@dataclass(frozen=True)
class Pretrain(et.Task):
    def model(self) -> nn.Module:
        return Llama(CONFIG)

    def optimizer(self, named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named_params])

    def dataset(self) -> Any:
        return [SAMPLE]

    def loss(self, output: torch.Tensor, micro_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return next_token_loss(output, micro_batch)


class Peeking(Pretrain):
    """Its loss looks at a value, which a traced tensor does not have."""

    def loss(self, output: torch.Tensor, micro_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if output.sum().item() > 0:
            output = output * 2
        return next_token_loss(output, micro_batch)


def traced(task: et.Task, precision: Precision = "fp32") -> Trace | None:
    spec = RunSpec(
        name="r",
        storage_path="s",
        batch=et.Batch(global_size=MICRO, micro_size=MICRO),
        max_steps=1,
        min_workers=1,
        max_workers=1,
        precision=precision,
    )
    blueprint = draw(task, precision)
    model: Any = blueprint.model
    return trace_layers(task, spec, blueprint, list(model.layers), ())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_are_those_of_a_real_step(precision: Precision) -> None:
    trace = traced(Pretrain(), precision)
    assert trace is not None
    model = Llama(CONFIG)
    tokens = torch.stack([SAMPLE] * MICRO)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with LiveBytes((*model.parameters(), *model.buffers(), tokens)) as live:
        with compute_in(CPU, precision), cast_again(precision == "bf16"):
            loss, _ = next_token_loss(model(tokens), tokens)
        kept = live.now
        loss.backward()
    layers = trace.layers.values()
    assert sum(layer.kept for layer in layers) == pytest.approx(kept, rel=0.01)
    peak = sum(layer.kept for layer in layers) + max(layer.working for layer in layers)
    assert live.peak <= peak <= 1.15 * live.peak


def test_attention_is_fused_where_torch_fuses_it() -> None:
    trace = traced(Pretrain())
    assert trace is not None
    block = trace.layers[0]
    scores = MICRO * CONFIG.heads * SEQUENCE**2 * 4
    tokens, dim = MICRO * SEQUENCE, CONFIG.dim
    matrices = 2 * tokens * (2 * dim * dim + 2 * dim * dim // 2 + 3 * dim * CONFIG.hidden)
    assert block.kept < 20 * tokens * dim * 4 + scores / 2, "no scores are kept"
    assert block.repeated_flops == 4 * tokens * SEQUENCE * dim
    assert block.flops == matrices + block.repeated_flops


def test_the_loss_belongs_to_what_comes_after_the_blocks() -> None:
    trace = traced(Pretrain())
    assert trace is not None
    logits = MICRO * SEQUENCE * CONFIG.vocabulary * 4
    assert trace.layers[BLOCKS].kept >= logits, "the loss keeps its probabilities"
    assert trace.layers[BLOCKS].working >= logits, "and their gradient is as large"


def test_a_model_that_looks_at_values_is_not_traced() -> None:
    assert traced(Peeking()) is None


def test_casts_of_weights_are_made_again_in_backward_with_the_same_bits() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(
        Llama(CONFIG), nn.Unflatten(1, (1, -1)), nn.Conv2d(1, 2, 3), nn.Flatten(2, 3), nn.Linear(510, 4)
    )
    tokens = torch.stack([SAMPLE] * MICRO)
    results, held = [], []
    for again in (False, True):
        model.zero_grad()
        with LiveBytes((*model.parameters(), *model.buffers(), tokens)) as live:
            with compute_in(CPU, "bf16"), cast_again(again):
                output = model[-1](model[-2](model[-3](model[-4](model[0](tokens))))[..., :510])
            held.append(live.now)
            output.float().sum().backward()
        results.append([output, *(p.grad for p in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1) - CONFIG.vocabulary * CONFIG.dim
    assert held[0] - held[1] == pytest.approx(2 * matrices, rel=0.02)
