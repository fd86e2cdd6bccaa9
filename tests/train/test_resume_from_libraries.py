"""What other libraries wrote is imported by the command line and trained on under other plans: the losses are
those of each library's own resume, which `tests/fixtures/write_libraries.py` wrote beside its checkpoint.
"""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_train.checkpoint.exporters.dcp import export_dcp
from elastic_train.checkpoint.exporters.hf import export_hf
from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.cli.import_checkpoint import import_checkpoint
from elastic_train.config import Batch, RunSpec
from elastic_train.storage.fsspec_store import open_store
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.train.task import Task
from tests.tasks.library_net import (
    BATCH,
    DECAYED,
    LAST,
    LLAMA,
    SAVED,
    Net,
    Samples,
    TokenRows,
    grouped,
    loss_of,
)
from tests.train.test_train_from_foreign import restored

pytestmark = pytest.mark.ring2

ORDER = (*DECAYED, "inner.bias", "norm.weight", "norm.bias", "head.bias")
"""The parameters in the order of the optimizer's groups."""


@dataclass
class Continued(Task):
    prefix: str = ""

    def model(self) -> nn.Module:
        return Wrapped() if self.prefix else Net()

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(grouped(named_params))

    def dataset(self) -> Samples:
        return Samples()

    def loss(self, output: torch.Tensor, micro_batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        count = len(micro_batch["target"])
        return loss_of(output, micro_batch) * count, count


class Wrapped(nn.Module):
    """As a LightningModule holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net(tokens)


class Llama(Continued):
    """What Trainer trained, with Trainer's own groups."""

    def model(self) -> nn.Module:
        transformers = pytest.importorskip("transformers")
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        named = list(named_params)
        return torch.optim.AdamW(
            [
                {"params": [p for n, p in named if "norm" not in n], "weight_decay": 0.1},
                {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0},
            ],
            lr=1e-2,
        )

    def dataset(self) -> Samples:
        return TokenRows()

    def loss(self, output: Any, micro_batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        targets = micro_batch["labels"][:, 1:].flatten()
        logits = output.logits[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, targets, reduction="sum"), len(targets)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("libraries")
    with tarfile.open(Path(__file__).parents[1] / "fixtures" / "libraries_tiny.tar.gz") as archive:
        archive.extractall(target, filter="data")
    return target


def spec(clip: float | None) -> RunSpec:
    return RunSpec(
        name="continued",
        storage_path="/nowhere",
        batch=Batch(global_size=BATCH, micro_size=2, shuffle=False),
        max_steps=LAST,
        min_workers=1,
        max_workers=4,
        clip_norm=clip,
    )


CASES = {
    "tar/checkpoint.pth.tar": (Continued(), ORDER, (1, 3)),
    "accelerate/state": (Continued(), ORDER, (2, 1)),
    "ray_train/checkpoint": (Continued(), ORDER, (3, 1)),
    "lightning/last.ckpt": (Continued("net."), [f"net.{name}" for name in ORDER], (1, 2)),
    "trainer/checkpoint-4": (Llama(), None, (2, 2)),
    "titan/checkpoint/step-4": (Continued(), None, (1, 3)),
    "fsdp_full/full.pt": (Continued(), None, (2, 1)),
    "fsdp_sharded/sharded": (Continued(), None, (3, 1)),
}
"""What is opened; the task that goes on; the optimizer's parameters, where names are needed; the mesh."""


@pytest.mark.parametrize("name", CASES)
def test_the_losses_are_those_of_the_librarys_own_resume(
    pool: GlooPool, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    task, order, mesh = CASES[name]
    run, given = str(tmp_path / "run"), None
    if order is not None:
        (tmp_path / "names.json").write_text(json.dumps(order))
        given = str(tmp_path / "names.json")
    import_checkpoint(str(written / name), run, spec=None, copy=False, show=False, names=given)
    said = capsys.readouterr().out
    assert f": step {SAVED}\n" in said
    checkpoint = open_checkpoint(run)
    assert "the optimizer:" not in said
    trained = {fqn for group in checkpoint.document["optimizer"]["groups"] for fqn in group["params"]}
    assert {(fqn, moment) for fqn in trained for moment in ("exp_avg", "exp_avg_sq")} <= set(
        checkpoint.tensors
    )
    for number, export in enumerate((export_dcp, export_hf)):
        back = str(tmp_path / f"back-{number}")
        export(checkpoint, open_store(back))
        found = open_checkpoint(back)
        assert export is export_hf or found.tensors == checkpoint.tensors
        for tensor, state in found.tensors:
            kept = next(s for s in (state, "param") if s in checkpoint[tensor])
            assert found.read(tensor, state).tobytes() == checkpoint.read(tensor, kept).tobytes()
    gang = Gang(pool, task, spec(1.0 if name.startswith("trainer") else None))
    gang.join(gang.plan(*mesh), range(mesh[0] * mesh[1]))
    found = pool.run(restored, run, ranks=gang.processes)
    assert len({digest for digest, _ in found}) == 1
    reports = gang.run()
    assert [r.step for r in reports] == list(range(SAVED + 1, LAST + 1))
    theirs = json.loads((written / name.partition("/")[0] / "losses.json").read_text())
    assert [r.loss for r in reports] == pytest.approx(theirs, abs=2e-6)
