"""A search with Ray Tune: its trials share a cluster, lose a node without a step, and leave nothing."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune

import elastic_train as et
from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.cluster.actor_names import NAMESPACE
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.cluster.ray_calls import named_actors
from elastic_train.cluster.run_reading import records
from elastic_train.control.events import StepCommitted
from elastic_train.data.sample_range import SourcePart
from elastic_train.errors import ConfigError
from elastic_train.observe.journal_records import FormedGroup
from elastic_train.observe.ledger import ledger
from elastic_train.storage.fsspec_store import open_store
from elastic_train.testing.single_process_run import train_alone
from elastic_train.testing.slow_samples import SlowSamples
from tests.cluster.conftest import eventually, segments_of
from tests.faults.conftest import Runs

pytest.importorskip("sklearn", reason="scikit-learn ships the images of this job")
from jobs import tune_sweep

JOBS = tune_sweep.trainer
pytestmark = [pytest.mark.ring4, pytest.mark.timeout(500), pytest.mark.filterwarnings("default")]
NODES, CPUS = 3, 2
STEPS, AT = 32, 6
SPACE = {"lr": tune.grid_search([0.1, 1e-4, 1e-4]), "width": 16}


def formed(storage: Path, run: str) -> list[FormedGroup]:
    return [r.formed for r in records(open_store(str(storage / run))) if r.formed is not None]


def kill_a_node(cluster: LocalCluster, storage: Path, killed: list[str]) -> None:
    """The node of a rank of the best run, which ASHA never stops, once that has committed a few steps."""
    while not killed:
        time.sleep(0.2)
        for run in storage.glob("digits-*_00000"):
            there = tuple(records(open_store(str(run))))
            if any(isinstance(r.event, StepCommitted) and r.event.step >= AT for r in there):
                group = formed(storage, run.name)[-1]
                killed.append(group.nodes[-1])
                (node,) = (n.node_id for n in cluster.nodes if n.node_id.startswith(killed[0][:8]))
                cluster.kill_node(node)
                return


class Slow(tune_sweep.Digits):
    """Its steps last, so that a node is lost within one."""

    def dataset(self) -> Any:
        return SlowSamples(super().dataset(), 0.01)


def slow(config: dict[str, Any]) -> et.ElasticTrainer:
    made = JOBS(config)
    made.task = Slow(config["width"], config["lr"])
    return made


def test_trials_lose_a_node_without_a_step_and_asha_leaves_nothing(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_sweep, "trainer", slow)
    killed: list[str] = []
    killer = threading.Thread(target=kill_a_node, args=(runs.cluster, runs.storage, killed), daemon=True)
    killer.start()
    tuner = tune_sweep.tuner(samples=1, max_steps=STEPS, first=4, storage=str(runs.storage), space=SPACE)
    found = tuner.fit()
    killer.join(timeout=60)
    assert killed
    assert not found.errors
    steps = {result.metrics["step"] for result in found}
    assert STEPS in steps
    assert min(steps) < STEPS, "the worse ones were stopped early"
    lost = 0
    for result in found:
        there = tuple(records(open_store(result.metrics["path"])))
        read = ledger(there)
        assert read.superseded == (), "no step is lost with a node"
        groups = [
            killed[0] in group.nodes for group in formed(runs.storage, Path(result.metrics["path"]).name)
        ]
        lost += groups.count(True) > 0 and not groups[-1]
        made = JOBS(result.config)
        calm = {r.step: r.loss for r in train_alone(made.task, made.spec) if r.step in read.losses}
        assert read.losses == pytest.approx(calm, rel=1e-4)
        kept = open_checkpoint(et.tune.checkpoint_url(result))
        assert kept.document["step"] >= result.metrics["step"] or result.metrics["step"] < STEPS
    assert lost, "a run had a rank on the node, and went on elsewhere"
    assert [entry for entry in named_actors() if entry["namespace"] == NAMESPACE] == []
    assert segments_of("digits") == []
    eventually(
        "nodes that say that they are free",
        lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"],
        60.0,
    )


def test_a_trial_is_made_by_a_function_and_an_error_of_its_code_is_its_own(runs: Runs) -> None:
    with pytest.raises(ConfigError, match="no function"):
        et.tune.trainable(tune_sweep.trainer({"width": 4, "lr": 1, "max_steps": 1, "storage": "runs"}))  # type: ignore[arg-type]

    def wrong(config: dict[str, object]) -> et.ElasticTrainer:
        raise ValueError(f"no {config['lr']}")

    found = tune.Tuner(et.tune.trainable(wrong), param_space={"lr": 3}).fit()
    assert "no 3" in str(found.errors[0])


class Measured(tune_sweep.Digits):
    """Evaluated at every second step."""

    def evaluation(self) -> et.Evaluation:
        return et.Evaluation(dataset=SourcePart(self.dataset(), 0, 48), every=2)


def measured(config: dict[str, Any]) -> et.ElasticTrainer:
    made = JOBS(config)
    made.task = Measured(config["width"], config["lr"])
    return made


def search(storage: Path, metric: str, trainable: Any, rates: tuple[float, ...]) -> tune.ResultGrid:
    space = {"width": 16, "max_steps": 5, "storage": str(storage)}
    return tune.Tuner(
        trainable,
        param_space={"lr": tune.grid_search(list(rates)), **space},
        tune_config=tune.TuneConfig(metric=metric, mode="min", max_concurrent_trials=2),
        run_config=tune.RunConfig(storage_path=str(storage / "search"), name=f"search-{time.time_ns()}"),
    ).fit()


def test_runs_that_end_by_themselves_end_their_trials_with_what_is_compared(runs: Runs) -> None:
    found = search(runs.storage, "loss", et.tune.trainable(JOBS), (0.1, 1e-4))
    assert not found.errors
    for result in found:
        told = result.metrics_dataframe
        assert told is not None
        assert list(told["step"]) == [1, 2, 3, 4, 5], "each step once, the last one too"
        assert result.metrics["loss"] == list(told["loss"])[-1]
    assert found.get_best_result().config["lr"] == 0.1


def test_steps_that_have_the_metric_are_the_results(runs: Runs) -> None:
    (result,) = found = search(
        runs.storage, "eval_loss", et.tune.trainable(measured, metric="eval_loss"), (0.1,)
    )
    assert not found.errors
    told = result.metrics_dataframe
    assert told is not None
    assert list(told["step"])[:2] == [2, 4]
    assert all(told["eval_loss"].notna())
