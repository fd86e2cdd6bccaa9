"""A trial of a search before its run begins: where it is, and whose state it may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ray.train import RunConfig, ScalingConfig

import elastic_train as et
from elastic_train.errors import ConfigError
from elastic_train.integrations.tune.trial import CHECKPOINT, Trial

pytestmark = [pytest.mark.ring1, pytest.mark.filterwarnings("default")]


class Line(et.Task):
    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named_params], lr=0.1)

    def dataset(self) -> list[torch.Tensor]:
        return [torch.ones(1)] * 4

    def loss(self, output: Any, micro_batch: Any) -> Any:
        return output.sum(), len(micro_batch)


def made(config: dict[str, Any]) -> et.ElasticTrainer:
    return et.ElasticTrainer(
        Line(),
        batch=et.Batch(global_size=4, micro_size=2),
        max_steps=1,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="line", storage_path=config["storage"]),
    )


def trial(storage: str, metric: str | None = None) -> Trial:
    one = et.tune.trainable(made, metric=metric)(config={"storage": storage})
    assert isinstance(one, Trial)
    return one


def test_a_trial_goes_on_with_its_own_run_and_the_state_of_another_is_refused(tmp_path: Path) -> None:
    one = trial(str(tmp_path / "runs"))
    one.save_checkpoint(str(tmp_path))
    one.load_checkpoint(str(tmp_path))
    (tmp_path / CHECKPOINT).write_text("/runs/line-other")
    with pytest.raises(ConfigError, match="line-default the state of /runs/line-other: a trial goes on"):
        one.load_checkpoint(str(tmp_path))
    one.stop()
    assert not (tmp_path / "runs").exists(), "nothing was begun"


@pytest.mark.parametrize("copied", [False, True])
def test_a_relative_place_is_where_the_search_was_made_and_at_home_in_a_job_with_a_copied_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    """Ray removes the copy, with what was written into it, when the job has ended."""
    there = tmp_path / ("working_dir_files" if copied else "own")
    there.mkdir()
    monkeypatch.chdir(there)
    one = trial("runs")
    assert one._trainer.spec.storage_path == str((Path.home() if copied else there) / "runs")


def test_a_metric_that_no_step_of_a_run_has_is_named_at_its_end_with_those_that_there_are(
    tmp_path: Path,
) -> None:
    one = trial(str(tmp_path), metric="eval_lost")
    one._measured = {"step": 4, "loss": 1.0, "eval_loss": 2.0}
    with pytest.raises(ConfigError, match="has 'eval_lost'; what it measured is eval_loss, loss"):
        one._end()
    again = trial(str(tmp_path), metric="eval_loss")  # its process was started again: the run had ended
    again._measured = one._measured
    assert again._end().items() >= {"done": True, "step": 4, "eval_loss": 2.0}.items()
