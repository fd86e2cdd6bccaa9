"""A causal model of transformers under plans of tp and pp, by its own plans."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from elastic_train.cluster.driver.run_planner import make_planner, shape_of
from elastic_train.config import Parallelism
from elastic_train.models.hugging_face import rules_of
from elastic_train.planner.plan import Mesh, WorkerSlot
from elastic_train.planner.question import Planned, Question
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


@pytest.mark.ring0
def test_a_pipeline_is_cut_where_the_models_own_plan_says_and_nothing_lies_between() -> None:
    tiny = json.loads(TINY)
    made = model(tiny.pop("model_type"), **tiny)
    before = [name for name, _ in made.named_modules()]
    rules = rules_of(made)
    assert (rules.stages, rules.hands_on) == (("model.layers.*",), "logits")
    assert rules.everywhere == ("model.rotary_emb",)
    assert [name for name, _ in made.named_modules()] == before
    scaled = model("granite", **tiny, embedding_multiplier=12.0)
    assert getattr(scaled, "pp_plan", None), "it has a plan, and scales embeddings outside of a module"
    assert rules_of(scaled).stages == ()
    assert rules_of(model("gpt2", n_layer=1, n_embd=32, n_head=4)).stages == ()


@pytest.mark.ring0
def test_a_run_of_such_a_model_is_planned_over_tp_and_pp() -> None:
    job = trainer(seq_len=16, workers="4:4")
    spec = replace(job.spec, parallelism=Parallelism(tp=2, pp=2))
    node = {"Alive": True, "Resources": {"CPU": 4.0}}
    planned = make_planner(job.task, spec, shape_of(job.task, spec), [node])(
        Question(worker_slots=tuple(WorkerSlot(worker=f"w{i}", node="n") for i in range(4)))
    )
    assert isinstance(planned, Planned), planned.reason
    assert (planned.plan.mesh, planned.plan.stages) == (Mesh(pp=2, tp=2), ((0, 1), (1, 2)))


APART = [Mesh(tp=2), Mesh(dp_shard=2, tp=2), Mesh(pp=2)]
TOGETHER = [Mesh(pp=2, tp=2)]


@pytest.mark.ring2
@pytest.mark.matrix
@pytest.mark.parametrize("meshes", [APART, pytest.param(TOGETHER, marks=pytest.mark.matrix)])
def test_plans_of_all_axes_compute_what_one_process_does(pool: GlooPool, meshes: list[Mesh]) -> None:
    job = trainer(seq_len=16, max_steps=3)
    spec = replace(job.spec, precision="fp64")
    gang = Gang(pool, job.task, spec)
    found = []
    for mesh in (Mesh(), *meshes):
        gang.form(gang.plan_on(mesh, stages=((0, 1), (1, 2)) if mesh.pp > 1 else ()))
        found.append([report.loss for report in gang.run()])
    for losses in found[1:]:
        np.testing.assert_allclose(losses, found[0], rtol=1e-9)
