"""Adapters in the Hugging Face job: the base stays as it was given, and is written once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.references import References
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.writer import write_part
from elastic_train.config import Checkpoints
from elastic_train.errors import ConfigError
from elastic_train.planner.plan import Mesh
from elastic_train.storage.memory_store import MemoryStore
from elastic_train.testing.gang import Gang
from elastic_train.testing.gang_member import take
from elastic_train.testing.gloo_pool import GlooPool
from jobs.finetune_hf import TINY, trainer

pytestmark = pytest.mark.ring2


@pytest.fixture(scope="module")
def pool() -> Iterator[GlooPool]:
    with GlooPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as transformers saves it, with weights that no initialisation would make."""
    directory = tmp_path_factory.mktemp("base")
    (directory / "config.json").write_text(TINY)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(TINY)))
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, directory / "model.safetensors")
    return directory


@pytest.mark.matrix
def test_plans_train_the_adapters_alike_and_leave_the_base(pool: GlooPool, base: Path) -> None:
    made = trainer(config=str(base), lora_rank=4, seq_len=16, lr=1e-1, global_size=4, workers="1:2")
    spec = replace(made.spec, precision="fp64", max_steps=3)
    gang, losses, states = Gang(pool, made.task, spec), [], []
    for mesh in (Mesh(), Mesh(tp=2), Mesh(dp_shard=2)):
        gang.form(gang.plan_on(mesh))
        losses.append([report.loss for report in gang.run()])
        states.append(gang.whole())
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-9)
    assert losses[0][-1] < losses[0][0] - 0.01
    for name, value in load_file(base / "model.safetensors").items():
        adapted = re.sub(r"([qv]_proj)\.", r"\1.base_layer.", name)
        for state in states:
            assert np.array_equal(state[adapted, "param"], value.double().numpy()), name
    moved = {name for name, state in states[0] if state == "exp_avg"}
    assert len(moved) == 2 * 2 * 2, "two projections of two layers, two matrices each"
    assert all(".lora_" in name for name in moved)


@pytest.mark.matrix
def test_the_base_is_written_once_and_referred_to_after(pool: GlooPool, base: Path) -> None:
    made = trainer(config=str(base), lora_rank=2, seq_len=16, global_size=4, workers="1:2")
    spec = replace(made.spec, max_steps=3, checkpoints=Checkpoints(every=1))
    gang = Gang(pool, made.task, spec)
    gang.form(gang.plan(2, 1))
    gang.run()
    run = RunDirectory(MemoryStore())
    term, references = run.begin_term("test"), References(run)
    written: list[int] = []
    shares: list[list[Any]] = gang.pool.run(take, "saved", ranks=gang.processes)
    for of_step in zip(*shares, strict=True):
        (step, _, document) = of_step[0]
        directory = attempt_path(step=step, generation=1)
        frozen = {t for _, pieces, _ in of_step for t, s, *_ in pieces if s == "param"}
        unchanged = references.unchanged(frozen - set(document["trainable"]))
        parts = [
            write_part(run.store, directory, rank, [_piece(*p) for p in pieces], unchanged=unchanged)
            for rank, (_, pieces, _) in enumerate(of_step)
        ]
        assembled = assemble(run.store, directory, parts, document, aliases=document["aliases"])
        run.commit(assembled, term=term, generation=1, step=step, lineage=[(1, 0)])
        written.append(assembled.bytes)
    weights = sum(value.numel() * 4 for value in load_file(base / "model.safetensors").values())
    assert written[0] - max(written[1:]) >= weights, written


def test_a_target_that_is_nowhere_is_refused_by_name() -> None:
    made = trainer(lora_rank=4, lora_targets="q_proj,query")
    with torch.device("meta"), pytest.raises(ConfigError, match=r"no linear module is named 'query'.*q_proj"):
        made.task.model()


def test_a_directory_without_a_tensor_of_the_base_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(TINY)
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    task = trainer(config=str(tmp_path), lora_rank=1).task
    with pytest.raises(ConfigError, match=r"has no tensor 'model.embed_tokens.weight'"):
        task.model()


def _piece(tensor: str, state: str, dtype: str, shape: Any, box: Any, data: bytes) -> Piece:
    return Piece(tensor=tensor, state=state, dtype=dtype, shape=shape, box=box, data=data)
