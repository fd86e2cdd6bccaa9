"""Documents packed into one sequence train as if each were alone, under every plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from elastic_train.config import Batch, RunSpec
from elastic_train.data.packing import Packed
from elastic_train.models.llama import Llama
from elastic_train.models.loss import next_token_loss
from elastic_train.models.sizes import LlamaConfig, size
from elastic_train.planner.plan import Mesh, Recompute
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.reference import assert_state_near, reference
from elastic_train.train.task import Rules
from tests.tasks.chain import LENGTH, VOCABULARY, ChainTask

pytestmark = pytest.mark.ring2

PAD = 0


def documents(count: int) -> list[np.ndarray]:
    """Of lengths 2 .. 9, without the token that pads."""
    drawn = np.random.default_rng(3)
    return [drawn.integers(1, VOCABULARY, size=drawn.integers(2, 10)) for _ in range(count)]


def test_a_packed_batch_has_the_losses_and_gradients_of_the_separate_documents() -> None:
    config = LlamaConfig(dim=16, layers=3, heads=4, kv_heads=2, hidden=40, vocabulary=VOCABULARY)
    torch.manual_seed(0)
    model = Llama(config).double()
    texts = documents(11)
    packed = Packed(texts, seq_len=19, pad=PAD)
    windows = [packed[i] for i in range(len(packed))]
    assert max(window["documents"].max() for window in windows) > 2

    alone, count = torch.zeros((), dtype=torch.float64), 0
    for text in texts:
        tokens = torch.from_numpy(text)[None]
        loss, counted = next_token_loss(model(tokens), tokens, ignore_index=PAD)
        alone, count = alone + loss, count + int(counted)
    alone.backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()

    batch = {key: torch.from_numpy(np.stack([w[key] for w in windows])) for key in windows[0]}
    output = model(batch["tokens"], batch["documents"])
    loss, counted = next_token_loss(output, batch["tokens"], batch["documents"], ignore_index=PAD)
    loss.backward()
    assert int(counted) == count == sum(len(text) - 1 for text in texts)
    torch.testing.assert_close(loss, alone, rtol=1e-12, atol=0)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-12)


def test_without_documents_nothing_is_different() -> None:
    torch.manual_seed(0)
    model = Llama(size("nano")).double()
    tokens = torch.randint(99, (2, 7))
    torch.testing.assert_close(model(tokens, torch.ones_like(tokens)), model(tokens))


@dataclass
class PackedTask(ChainTask):
    """The chain on windows of packed documents."""

    def dataset(self) -> Any:
        return Packed(documents(90), seq_len=2 * LENGTH - 1, pad=PAD)  # and one more: 12 for cp 2 and 4

    def loss(self, output: Tensor, micro_batch: Any) -> tuple[Tensor, Tensor]:
        return next_token_loss(output, micro_batch["tokens"], micro_batch["documents"], ignore_index=PAD)

    def parallelize(self) -> Rules:
        return Llama.rules(packed=True)


@pytest.mark.parametrize(
    ("mesh", "recompute"),
    [
        (Mesh(pp=3), "full"),
        (Mesh(pp=2, cp=2), "none"),
        pytest.param(Mesh(cp=4), "full", marks=pytest.mark.matrix),
        pytest.param(Mesh(pp=2, tp=2), "none", marks=pytest.mark.matrix),
        pytest.param(Mesh(dp_shard=2, tp=2), "selective", marks=pytest.mark.matrix),
    ],
)
def test_stages_in_the_middle_know_the_documents_too(
    pool: GlooPool, mesh: Mesh, recompute: Recompute
) -> None:
    run = RunSpec(
        name="packed",
        storage_path="/nowhere",
        batch=Batch(global_size=13, micro_size=3, seed=11),
        max_steps=3,
        min_workers=1,
        max_workers=4,
        precision="fp64",
    )
    gang = Gang(pool, PackedTask(), run)
    stages = {1: (), 2: ((0, 1), (1, 4)), 3: ((0, 1), (1, 3), (3, 4))}[mesh.pp]
    gang.form(gang.plan_on(mesh, stages=stages, recompute=recompute))
    expected = reference(PackedTask(), run, gang.whole())
    reports = gang.run()
    np.testing.assert_allclose([r.loss for r in reports], expected.losses, rtol=1e-9)
    assert_state_near(gang.whole(), expected.state)
