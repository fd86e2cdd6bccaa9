"""The Hugging Face job: any plan trains the model that transformers builds, with the same losses."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest

from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool

pytest.importorskip("transformers", reason="the models of this job come from transformers")
pytestmark = [pytest.mark.ring2, pytest.mark.matrix]


@pytest.fixture(scope="module")
def job() -> ModuleType:
    return importlib.import_module("jobs.finetune_hf")


@pytest.fixture(scope="module")
def pool() -> Iterator[GlooPool]:
    with GlooPool(2) as pool:
        yield pool


def test_replicated_and_sharded_groups_have_the_losses_of_one_process(job: ModuleType, pool: GlooPool):
    made = job.trainer(max_steps=5, seq_len=32, lr=1e-2, global_size=4)
    spec = dataclasses.replace(made.spec, precision="fp64", max_steps=5)
    losses: list[list[float]] = []
    for plan in ((1, 1), (2, 1), (1, 2)):
        gang = Gang(pool, made.task, spec)
        gang.form(gang.plan(*plan))
        losses.append([report.loss for report in gang.run()])
    assert losses[0][0] == pytest.approx(5.56, abs=0.1), "new weights know nothing"
    assert losses[0][-1] < losses[0][0] - 0.1
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    assert losses[2] == pytest.approx(losses[0], rel=1e-9)
