"""Exceptions of the job's own code, wherever it runs: the run ends at once, and goes on once it is mended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_train.cluster.driver.launch import fit
from elastic_train.control.events import TermBegan
from elastic_train.data.numbered import NumberedSamples
from elastic_train.data.order import SampleOrder
from elastic_train.errors import UserCodeError
from elastic_train.observe.journal_records import Record
from jobs.pretrain_lm import Pretrain
from tests.faults.conftest import WHOLE, Runs, assert_same_training
from tests.faults.test_matrix import PLANS

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(600)]
NODES, CPUS = 3, 2
STEPS, EVERY = 18, 5
PLACES = {"dataset": 4, "loss": 9, "model": 14}
"""Where a bug is, and the step whose samples bring it out."""


class Picky:
    """A data set that cannot read one of its samples."""

    def __init__(self, inner: NumberedSamples, bad: int) -> None:
        self._inner, self._bad = inner, bad

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, sample: int) -> Any:
        if sample == self._bad:
            raise OSError("a sample that cannot be read")
        return self._inner[sample]


@dataclass(frozen=True, kw_only=True)
class Buggy(Pretrain):
    """A bug is there as long as the file with its name is. `bad` is the sample that cannot be read, `rows`
    are those that bring out the others.
    """

    bugs: str
    bad: int
    rows: dict[str, tuple[int, ...]]

    def _there(self, place: str) -> bool:
        return (Path(self.bugs) / place).exists()

    def dataset(self) -> NumberedSamples:
        inner = super().dataset()
        return Picky(inner, self.bad) if self._there("dataset") else inner

    def loss(self, output: torch.Tensor, micro_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self._there("loss") and self._has(micro_batch, "loss"):
            raise ValueError("a loss that cannot be had")
        return super().loss(output, micro_batch)

    def model(self) -> torch.nn.Module:
        model = super().model()

        def hook(module: torch.nn.Module, inputs: Any) -> None:
            if model.training and self._there("model") and self._has(inputs[0], "model"):
                raise KeyError("a layer that cannot be found")

        model.register_forward_pre_hook(hook)
        return model

    def _has(self, tokens: torch.Tensor, place: str) -> bool:
        if tokens.is_floating_point() or tokens.is_meta:  # a later stage's, or a profile
            return False
        return any(tuple(row) == self.rows[place] for row in tokens.tolist())


@pytest.mark.parametrize("plan", ["dp2", "hsdp", "fsdp", "pp2dp2", "tp2pp2"])
def test_a_bug_ends_a_run_at_once_and_mended_it_goes_on(runs: Runs, tmp_path: Path, plan: str) -> None:
    chosen = PLANS[plan]
    task, spec = runs.spec(
        f"{plan}-bugs",
        workers=f"{chosen.least}:{chosen.ranks}",
        max_steps=STEPS,
        standby=0,
        timing=WHOLE,
        parallelism=chosen.parallelism,
    )
    samples = task.dataset()
    order = SampleOrder(len(samples), spec.batch)
    bad = {place: order.micro_batches(step)[0].ids[0] for place, step in PLACES.items()}
    rows = {place: tuple(samples[bad[place]].tolist()) for place in ("loss", "model")}
    job = Buggy(**vars(task), bugs=str(tmp_path), bad=bad["dataset"], rows=rows)
    for place in PLACES:
        (tmp_path / place).touch()
    for term, (place, step) in enumerate(PLACES.items(), start=1):
        with pytest.raises(UserCodeError, match="cannot be") as raised:
            fit(job, spec, address=None, local_nodes=0, quiet=True)
        assert raised.value.step == step
        assert raised.value.phase
        assert "test_user_errors.py" in raised.value.traceback
        groups = [r for r in of_term(runs.records(spec.name), term) if r.formed is not None]
        assert len(groups) == 1, "nothing is tried again"
        (tmp_path / place).unlink()
    whole = fit(job, spec, address=None, local_nodes=0, quiet=True)
    assert_same_training(whole, runs.calm(steps=STEPS))
    assert len(whole.ledger.superseded) < len(PLACES) * 2 * EVERY, "those since a checkpoint that was durable"


def of_term(records: list[Record], term: int) -> list[Record]:
    """What was recorded since the controller of that term began."""
    began = [n for n, r in enumerate(records) if isinstance(r.event, TermBegan)]
    return records[began[term - 1] : began[term] if term < len(began) else None]
