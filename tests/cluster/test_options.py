"""What a person configures, seen on a real cluster of nodes with labels."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.train import CheckpointConfig, RunConfig, ScalingConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from typer.testing import CliRunner

import elastic_train as et
from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.cli.app import app
from elastic_train.cluster.controller.room_watch import holders
from elastic_train.cluster.driver.launch import prepare_local_environment
from elastic_train.cluster.driver.result import Result
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.cluster.ray_calls import remote
from elastic_train.cluster.ray_private import LivingActor, living_actors
from elastic_train.errors import CapacityTimeout, ConfigError, NotFinite
from elastic_train.observe.journal_records import from_json
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.job_output import OutputReader
from elastic_train.storage.journal import read_journal
from elastic_train.testing.slow_samples import SlowSamples
from tests.cluster.conftest import eventually
from tests.tasks.tiny import TinyData, TinyTask

pytestmark = [pytest.mark.ring3, pytest.mark.timeout(400)]
REPOSITORY = Path(__file__).parents[2]
TIMING = et.Timing(join_window_s=1.0, wait_for_capacity_s=20.0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    prepare_local_environment()
    with LocalCluster(0) as made:
        made.nodes.append(made.cluster.add_node(num_cpus=2, labels={"market": "spot"}))
        made.nodes.append(made.cluster.add_node(num_cpus=2, labels={"market": "reserved"}))
        yield made


def fit(task: Any, storage: Path, **options: Any) -> Result:
    scaling = options.pop("scaling_config", ScalingConfig(num_workers=1))
    run = RunConfig(name="run", storage_path=str(storage), **options.pop("run", {}))
    prints = options.pop("prints", "none")
    machines = et.Machines(standby=0)
    defaults: dict[str, Any] = {"max_steps": 11, "machines": machines, "timing": TIMING}
    return et.ElasticTrainer(
        task,
        batch=et.Batch(global_size=4, micro_size=1),
        scaling_config=scaling,
        run_config=run,
        **defaults | options,
    ).fit(prints=prints)


class Measured(TinyTask):
    """Every third step is measured. Steps take long enough for the checkpoint before to be durable."""

    def dataset(self) -> Any:
        return SlowSamples(super().dataset(), 0.1)

    def evaluation(self) -> et.Evaluation:
        return et.Evaluation(dataset=TinyData(5), every=3, metric=accuracy)


def accuracy(output: torch.Tensor, micro_batch: Any) -> dict[str, tuple[Any, int]]:
    """Whatever the model makes of it."""
    return {"accuracy": (output.sin().sum(), len(output))}


def test_the_best_checkpoint_is_where_it_was_measured(cluster: LocalCluster, tmp_path: Path) -> None:
    said = io.StringIO()
    with redirect_stdout(said):
        result = fit(
            Measured(),
            tmp_path,
            checkpoints=et.Checkpoints(every=5, keep=1, best="accuracy", best_order="max"),
        )
    assert result.outcome == "finished"
    measured = {e.step: dict(e.metrics)["accuracy"] for e in result.ledger.kept if e.metrics}
    assert measured.keys() == {3, 6, 9, 11}
    best = max(measured, key=measured.__getitem__)
    kept = {c.step: dict(c.metrics) for c in RunDirectory(open_store(str(tmp_path / "run"))).records()}
    assert kept.keys() == {best, 11}
    assert kept[best]["accuracy"] == measured[best]
    assert f"best accuracy {measured[best]:.4g} at step {best}" in said.getvalue()


def test_a_metric_that_no_evaluation_has_ends_the_run_by_name(cluster: LocalCluster, tmp_path: Path) -> None:
    kept = CheckpointConfig(checkpoint_score_attribute="acuracy")
    with pytest.raises(ConfigError, match="Did you mean 'accuracy'"):
        fit(Measured(), tmp_path, run={"checkpoint_config": kept})


class Prints(TinyTask):
    """Prints by several means, on each rank and in its last step."""

    def loss(self, output: torch.Tensor, micro_batch: Any) -> tuple[torch.Tensor, Any]:
        import os
        import warnings

        print("printed \x1b[31mred")
        os.write(2, b"written past Python\n")
        warnings.warn("warned", stacklevel=1)
        return super().loss(output, micro_batch)


def test_what_the_job_prints_is_in_its_logs_and_a_normal_end_is_quiet(
    cluster: LocalCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit(Prints(), tmp_path, max_steps=3, scaling_config=ScalingConfig(num_workers=2), prints="first")
    time.sleep(3.0)  # what Ray has to say of processes that ended
    shown = capfd.readouterr()
    assert "unexpected system error" not in shown.out + shown.err
    assert r"rank 0 | printed \x1b[31mred" in shown.out
    assert "rank 1 |" not in shown.out
    lines = OutputReader(open_store(str(tmp_path / "run"))).new()
    for rank in (0, 1):
        said = [line.text for line in lines if line.rank == rank]
        assert "written past Python" in said
        assert any("warned" in text for text in said)
        # Two micro-batches each in three steps, and the first one twice, to see that loss keeps nothing.
        assert said.count("printed \x1b[31mred") == 7
    told = CliRunner().invoke(app, ["logs", str(tmp_path / "run"), "--rank", "1"])
    assert told.exit_code == 0, told.output
    assert r"rank 1 | printed \x1b[31mred" in told.output
    assert "rank 0 |" not in told.output
    assert "finished at step 3" in told.output


class NeverFinite(TinyTask):
    def loss(self, output: torch.Tensor, micro_batch: Any) -> tuple[torch.Tensor, Any]:
        loss, count = super().loss(output, micro_batch)
        return loss * (math.nan if output.device.type == "cpu" else 1.0), count


def test_a_run_that_is_not_finite_ends_as_an_error_of_the_job(cluster: LocalCluster, tmp_path: Path) -> None:
    with pytest.raises(NotFinite, match="5 steps in a row, 1 to 5") as raised:
        fit(NeverFinite(), tmp_path, limits=et.Limits(not_finite=5), max_steps=1000)
    assert "no step before them was finite" in str(raised.value)


class Environment(TinyTask):
    """Tells where its workers run, and what they were started with."""

    def __init__(self, seen: Path) -> None:
        super().__init__()
        self.seen = seen

    def dataset(self) -> Any:
        import os

        import ray

        node = ray.get_runtime_context().get_node_id()
        self.seen.mkdir(exist_ok=True)
        (self.seen / f"{node} {os.getpid()}").write_text(os.environ.get("ET_TOKEN", ""))
        return super().dataset()


def test_workers_run_where_labels_say_with_what_they_are_given(cluster: LocalCluster, tmp_path: Path) -> None:
    result = fit(
        Environment(tmp_path / "seen"),
        tmp_path,
        max_steps=2,
        scaling_config=ScalingConfig(num_workers=2, label_selector={"market": "!spot"}),
        run={"worker_runtime_env": {"env_vars": {"ET_TOKEN": "secret"}}},
    )
    assert result.outcome == "finished"
    reported = {file.name.split()[0]: file.read_text() for file in (tmp_path / "seen").iterdir()}
    assert reported == {cluster.nodes[1].node_id: "secret"}
    assert not [f for f in tmp_path.rglob("*.json*") if "secret" in f.read_text()]


def test_workers_are_alone_on_their_nodes_where_that_is_asked_for(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    fit(
        Environment(tmp_path / "seen"),
        tmp_path,
        max_steps=2,
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
    )
    nodes = [file.name.split()[0] for file in (tmp_path / "seen").iterdir()]
    assert sorted(nodes) == sorted(node.node_id for node in cluster.nodes)


def test_nodes_that_no_label_selects_are_no_capacity(cluster: LocalCluster, tmp_path: Path) -> None:
    with pytest.raises(CapacityTimeout, match="market=gold"):
        fit(
            TinyTask(),
            tmp_path,
            scaling_config=ScalingConfig(num_workers=2, label_selector={"market": "gold"}),
            timing=et.Timing(wait_for_capacity_s=3.0),
        )


SCRIPT = """
import sys
import elastic_train as et
from tests.tasks.tiny import TinyTask
from ray.train import RunConfig, ScalingConfig
et.ElasticTrainer(
    TinyTask(), batch=et.Batch(global_size=4, micro_size=1), max_steps=2,
    scaling_config=ScalingConfig(num_workers=1), run_config=RunConfig(storage_path=sys.argv[1]),
).fit()
"""


def test_a_script_joins_the_cluster_of_its_environment_and_is_the_same_run_again(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    script = tmp_path / "squares.py"
    script.write_text(SCRIPT)
    paths = {"PYTHONPATH": str(REPOSITORY), "RAY_ADDRESS": cluster.cluster.address}
    environment = os.environ | paths
    said: list[str] = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(script), str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    nodes = {node.node_id[:8] for node in cluster.nodes}
    records = [
        from_json(line) for _, part in read_journal(open_store(str(tmp_path / "squares"))) for line in part
    ]
    formed = [record.formed for record in records if record.formed is not None]
    assert len(formed) == 1
    assert set(formed[0].nodes) <= nodes
    assert "already complete" in said[1]


def test_another_address_than_that_of_the_connection_is_told(cluster: LocalCluster, tmp_path: Path) -> None:
    made = et.ElasticTrainer(
        TinyTask(),
        batch=et.Batch(global_size=4, micro_size=1),
        max_steps=2,
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    with pytest.raises(ConfigError, match=r"10\.255\.255\.1:6379, and this process is connected to"):
        made.fit(address="10.255.255.1:6379")


# -- room that others have


class Sleeps:
    """An actor that takes its time to come up."""

    def __init__(self, seconds: float) -> None:
        time.sleep(seconds)

    def here(self) -> bool:
        return True


def test_an_actor_that_waits_for_room_is_told_from_one_that_is_slow_to_start(cluster: LocalCluster) -> None:
    node = cluster.nodes[0].node_id
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    kind = remote(Sleeps)
    holder = kind.options(num_cpus=2, name="holder", scheduling_strategy=there).remote(0.0)
    assert ray.get(holder.here.remote(), timeout=60.0)
    waits = kind.options(num_cpus=1, name="waits", scheduling_strategy=there).remote(300.0)

    def known() -> dict[str, LivingActor]:
        return {actor.name: actor for actor in living_actors()}

    eventually("Ray knows it", lambda: "waits" in known())
    assert (known()["waits"].has_process, known()["waits"].resources) == (False, {"CPU": 1.0})
    assert (known()["holder"].has_process, known()["holder"].node) == (True, node)
    assert [a.name for a in holders({"CPU": 1.0}, {"CPU": 2.0}, [known()["holder"]])] == ["holder"]
    ray.kill(holder)
    eventually("it has its room, and is still starting", lambda: known()["waits"].has_process)
    assert "holder" not in known()
    ray.kill(waits)
