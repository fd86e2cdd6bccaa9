"""Experts that DeepSpeed divided among ranks are trained on under other plans: the losses are those of its
own resume, which `tests/fixtures/write_deepspeed_moe.py` wrote beside its checkpoints.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_train.cli.import_checkpoint import import_checkpoint
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from tests.tasks.expert_net import ExpertNet, grouped
from tests.tasks.library_net import LAST, SAVED
from tests.train.test_resume_from_libraries import Continued, spec
from tests.train.test_train_from_foreign import restored

pytestmark = pytest.mark.ring2


class Experts(Continued):
    def model(self) -> nn.Module:
        return ExpertNet()

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(grouped(named_params))


@pytest.mark.parametrize(("name", "mesh"), [("moe1", (1, 2)), ("moe1_data_first", (2, 1))])
def test_the_losses_are_those_of_deepspeeds_own_resume(
    pool: GlooPool, tmp_path: Path, name: str, mesh: tuple[int, int]
) -> None:
    with tarfile.open(Path(__file__).parents[1] / "fixtures/deepspeed_moe_tiny.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    run = str(tmp_path / "run")
    import_checkpoint(str(tmp_path / name), run, spec=None, copy=False, show=False)
    gang = Gang(pool, Experts(), spec(None))
    gang.join(gang.plan(*mesh), range(mesh[0] * mesh[1]))
    pool.run(restored, run, ranks=gang.processes)
    reports = gang.run()
    assert [r.step for r in reports] == list(range(SAVED + 1, LAST + 1))
    theirs = json.loads((tmp_path / name / "losses.json").read_text())
    assert [r.loss for r in reports] == pytest.approx(theirs, abs=5e-6)
