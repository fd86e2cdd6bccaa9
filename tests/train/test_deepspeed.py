"""A run that began in DeepSpeed goes on here and then in DeepSpeed again, as if it had never left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elastic_train.checkpoint.begin import begin
from elastic_train.checkpoint.exporters.ucp import export_ucp
from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.config import Checkpoints, ResumeFrom
from elastic_train.storage.fsspec_store import open_store
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from tests.deepspeed import peer
from tests.train.test_resume_on_other_plan import commit
from tests.train.test_train_from_foreign import Continued, restored, spec

pytestmark = [pytest.mark.ring2, pytest.mark.matrix, pytest.mark.timeout(900)]


def test_deepspeed_goes_on_from_what_we_trained(pool: GlooPool, tmp_path: Path) -> None:
    theirs, ours, back = (str(tmp_path / name) for name in ("theirs", "ours", "back"))
    alone = peer("train", tmp_path / "whole", "--stage", 1, "--steps", 8)["losses"]
    peer("train", theirs, "--stage", 1, "--steps", 4)
    begin(open_store(ours), ResumeFrom(url=theirs), holder="test")
    asked = replace(spec(1.0), max_steps=6, checkpoints=Checkpoints(every=6))
    gang = Gang(pool, Continued(), asked)
    plan = gang.plan(1, 3)
    gang.join(plan, range(plan.world_size))
    pool.run(restored, ours, ranks=gang.processes)
    losses = [report.loss for report in gang.run()]
    assert losses == pytest.approx(alone[4:6], abs=5e-6)
    commit(gang, str(tmp_path / "saved"), 6)
    export_ucp(open_checkpoint(str(tmp_path / "saved")), open_store(back))
    for ranks, stage in ((2, 1), (4, 2)):
        said = peer("--ranks", ranks, "train", "--stage", stage, "--steps", 8, "--load", back, "--universal")
        assert said["losses"] == pytest.approx(alone[6:], abs=5e-6), (ranks, stage)
