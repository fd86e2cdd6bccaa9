"""Models of transformers start with the values, and the first loss, that they have without us."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.train.task import Task
from tests.train.test_initial_values import MESHES, assert_values, first_ids, plain, spec

pytestmark = pytest.mark.ring2

SMALL = {"vocab_size": 50, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDE = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
KINDS = {
    "gpt2": (
        "AutoModelForCausalLM",
        {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2},
    ),
    "bert": ("AutoModelForMaskedLM", {**SMALL, **WIDE}),
    "llama": ("AutoModelForCausalLM", {**SMALL, **WIDE}),
    "mixtral": ("AutoModelForCausalLM", {**SMALL, **WIDE, "num_key_value_heads": 2, "num_local_experts": 2}),
    "t5": (
        "AutoModelForSeq2SeqLM",
        {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    ),
    "vit": (
        "AutoModelForImageClassification",
        {
            **WIDE,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
            "num_labels": 5,
        },
    ),
}


class Examples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, images: bool) -> None:
        self._images = images

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        if self._images:
            return {"pixel_values": torch.randn(3, 8, 8, generator=generator)}
        ids = torch.randint(1, 50, (8,), generator=generator)
        return {"input_ids": ids}


@dataclass
class Transformer(Task):
    """A model of transformers from a random configuration, or from a directory."""

    kind: str
    directory: str = ""

    def model(self) -> nn.Module:
        import transformers

        name, settings = KINDS[self.kind]
        made = getattr(transformers, name)
        if self.directory:
            return made.from_pretrained(self.directory)
        drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate"), 0.0)
        drop |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        return made.from_config(transformers.AutoConfig.for_model(self.kind, **settings, **drop))

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named_params], lr=1e-3)

    def dataset(self) -> Examples:
        return Examples(self.kind == "vit")

    def inputs(self, micro_batch: Any) -> Any:
        if self.kind == "t5":
            return {"input_ids": micro_batch["input_ids"], "decoder_input_ids": micro_batch["input_ids"]}
        return micro_batch

    def loss(self, output: Any, micro_batch: Any) -> Any:
        logits = output.logits
        if self.kind == "vit":
            return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long), reduction="sum"), len(
                logits
            )
        targets = micro_batch["input_ids"].flatten()
        return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"), len(targets)


def assert_first_loss(gang: Gang, pool: GlooPool, task: Transformer) -> None:
    model = plain(task.model).train()
    data = task.dataset()
    for mesh in MESHES:
        gang.form(gang.plan(*mesh))
        assert_values(gang, model)
        if mesh == (2, 1):
            continue
        (report,) = gang.run()
        total = count = 0.0
        for i in pool.run(first_ids, ranks=[0])[0]:
            batch = {key: value[None] for key, value in data[i].items()}
            loss, counted = task.loss(model(**task.inputs(batch)), batch)
            total, count = total + float(loss.detach()), count + counted
        assert report.loss == pytest.approx(total / count, rel=1e-6)


@pytest.mark.parametrize(
    "kind", [k if k in ("gpt2", "vit") else pytest.param(k, marks=pytest.mark.matrix) for k in KINDS]
)
def test_models_of_transformers_start_as_they_do_without_us(pool: GlooPool, kind: str) -> None:
    task = Transformer(kind)
    assert_first_loss(Gang(pool, task, spec()), pool, task)


def test_pretrained_weights_that_the_model_code_loads_are_kept(pool: GlooPool, tmp_path: Path) -> None:
    saved = Transformer("gpt2").model()
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.add_(0.125)
    saved.save_pretrained(tmp_path)
    task = Transformer("gpt2", str(tmp_path))
    assert torch.equal(task.model().transformer.wte.weight, saved.transformer.wte.weight)  # type: ignore[union-attr]
    assert_first_loss(Gang(pool, task, spec()), pool, task)


def test_the_job_without_weights_starts_as_transformers_does(pool: GlooPool) -> None:
    from jobs.finetune_hf import trainer

    made = trainer(seq_len=16, max_steps=1)
    gang = Gang(pool, made.task, made.spec)
    random.seed(made.spec.batch.seed)
    torch.manual_seed(made.spec.batch.seed)
    expected = made.task.model()
    for mesh in MESHES:
        gang.form(gang.plan(*mesh))
        assert_values(gang, expected)
