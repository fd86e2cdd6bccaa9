"""A causal model of transformers under tensor parallel plans, by its own plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from elastic_train.models.hugging_face import rules_of
from elastic_train.planner.plan import Mesh
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from jobs.finetune_hf import TINY, trainer


def model(kind: str, **settings: object) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))


@pytest.mark.ring0
def test_rules_are_the_models_own_plan() -> None:
    tiny = json.loads(TINY)
    rules = rules_of(model(tiny.pop("model_type"), **tiny))
    assert rules.tensor_parallel["model.layers.*.self_attn.q_proj"] == "column"
    assert rules.tensor_parallel["model.layers.*.mlp.down_proj"] == "row"
    assert rules.tensor_parallel["lm_head"] == "column_gathered"
    small = {"num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 99, "num_attention_heads": 4}
    assert not rules_of(model("gpt2", n_layer=1, n_embd=32, n_head=4)).tensor_parallel
    assert not rules_of(model("qwen3", **small)).tensor_parallel, "norms inside attention are not cut"


@pytest.mark.ring2
@pytest.mark.matrix
def test_plans_of_tensor_parallelism_compute_what_one_process_does(
    pool: GlooPool, new_generation: Iterator[int]
) -> None:
    job = trainer(seq_len=16, max_steps=3)
    spec = replace(job.spec, precision="fp64")
    gang = Gang(pool, new_generation, job.task, spec)
    found = []
    for mesh in (Mesh(), Mesh(tp=2), Mesh(dp_shard=2, tp=2)):
        gang.form(gang.plan_on(mesh))
        found.append([report.loss for report in gang.run()])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-9)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-9)
