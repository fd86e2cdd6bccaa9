"""What a person can get wrong before anything is started: a typed error that names it and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.train import FailureConfig, RunConfig, ScalingConfig

import elastic_train as et
from elastic_train.cluster.driver.launch import fit
from elastic_train.config import Checkpoints
from elastic_train.errors import ConfigError, StorageError
from jobs.pretrain_lm import Pretrain, trainer

pytestmark = pytest.mark.ring2


def job(**options: object) -> et.ElasticTrainer:
    return et.ElasticTrainer(
        trainer().task, batch=et.Batch(global_size=12, micro_size=2), max_steps=4, **options
    )


def test_an_unknown_option_is_named_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"chekpoints.*Did you mean 'checkpoints'"):
        job(chekpoints=Checkpoints(every=2))


def test_an_unknown_method_of_a_task_is_named_with_the_nearest_one() -> None:
    class Typo(Pretrain):
        def parallelise(self):
            return None

    with pytest.raises(ConfigError, match=r"parallelise.*parallelize"):
        et.ElasticTrainer(
            Typo(**vars(trainer().task)), batch=et.Batch(global_size=4, micro_size=1), max_steps=1
        )


def test_a_batch_smaller_than_the_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match="6 micro-batches, fewer than the 8 workers"):
        job(scaling_config=ScalingConfig(num_workers=(8, 9)))


def test_workers_that_share_a_micro_batch_count_as_one() -> None:
    many = ScalingConfig(num_workers=(24, 24))
    assert job(scaling_config=many, parallelism=et.Parallelism(tp=4)).spec.batch.micro_batches == 6
    with pytest.raises(ConfigError, match="fewer than the 12 groups of 2 that 24 workers form"):
        job(scaling_config=many, parallelism=et.Parallelism(tp=2))


def test_keeping_no_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpoints\.keep"):
        Checkpoints(keep=0)


def test_unknown_resources_are_refused() -> None:
    with pytest.raises(ConfigError, match="only CPU and GPU"):
        job(scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1, "licence": 1}))


@pytest.mark.parametrize("gpus", [0.5, 2])
def test_parts_of_gpus_and_several_of_them_for_one_worker_are_refused(gpus: float) -> None:
    with pytest.raises(ConfigError, match=f"GPU={gpus:g}: a worker is one process on one whole GPU"):
        job(scaling_config=ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"GPU": gpus}))


def test_a_budget_that_nobody_set_is_not_zero() -> None:
    assert job().spec.max_failures == 3
    config = RunConfig(name="a", failure_config=FailureConfig(max_failures=7))
    assert job(run_config=config).spec.max_failures == 7


def test_storage_that_cannot_be_written_is_found_before_anything_starts(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    made = trainer(storage=str(blocked / "runs"), max_steps=2)
    with pytest.raises(StorageError) as raised:
        fit(made.task, made.spec, address=None, local_nodes=1, quiet=True)
    assert str(blocked) in str(raised.value)
    assert raised.value.operation
