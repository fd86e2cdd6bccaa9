"""What of a job cannot be sent to workers is named, before anything is started."""

from __future__ import annotations

import stat
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

import elastic_train as et
from elastic_train.cluster import local_cluster
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.cluster.pickle_job import sent
from elastic_train.errors import ConfigError
from elastic_train.train.declaration.loop_task import LoopTask
from tests.tasks.tiny import TinyTask

pytestmark = pytest.mark.ring2


class Tracker:
    def __init__(self) -> None:
        self.pool = {"clients": [1, threading.Lock()]}


class Holding(TinyTask):
    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.tracker = thing


def loop(ctx: et.Context, *, tracker: Any) -> None:
    ctx.report(loss=0.0)


def closing_over(thing: Any) -> Any:
    def train(ctx: et.Context) -> None:
        ctx.report(loss=float(bool(thing)))

    return train


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Holding(Tracker()), r"task\.tracker\.pool\['clients'\]\[1\]"),
        (lambda: Holding({"rows": (row for row in range(3))}), r"task\.tracker\['rows'\]"),
        (lambda: LoopTask(partial(loop, tracker=threading.Lock())), r"task\.loop\.keywords\['tracker'\]"),
        (lambda: LoopTask(closing_over(threading.Lock())), "task.loop: its variable thing"),
    ],
    ids=["attribute", "generator", "partial", "closure"],
)
def test_what_cannot_be_sent_is_named_with_the_way_out(make: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as raised:
        sent(make())
    assert "cannot be sent to the workers" in raised.value.problem
    assert "dataset()" in raised.value.remedy


def test_what_can_be_sent_arrives() -> None:
    task = cloudpickle.loads(sent(Holding({"rate": 0.5})))
    assert task.tracker == {"rate": 0.5}


def test_a_run_ends_there_before_storage_is_touched(tmp_path: Path) -> None:
    made = et.ElasticTrainer(Holding(Tracker()), batch=et.Batch(global_size=4, micro_size=1), max_steps=1)
    made.spec = replace(made.spec, storage_path=str(tmp_path / "runs"))
    with pytest.raises(ConfigError, match=r"tracker\.pool"):
        made.fit(local_nodes=1)
    assert not (tmp_path / "runs").exists()


# -- the machine -----------------------------------------------------------------------------------------


def test_rays_directory_is_for_every_user_of_the_machine(tmp_path: Path) -> None:
    local_cluster.make_shared(tmp_path / "ray")
    assert stat.S_IMODE((tmp_path / "ray").stat().st_mode) == 0o1777
    (tmp_path / "ray").chmod(0o755)
    local_cluster.make_shared(tmp_path / "ray")
    assert stat.S_IMODE((tmp_path / "ray").stat().st_mode) == 0o755  # another's choice stays


def test_a_local_cluster_off_the_main_thread_is_refused_with_the_way_out() -> None:
    errors: list[BaseException] = []

    def start() -> None:
        try:
            LocalCluster(1)
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    (error,) = errors
    assert "main thread" in str(error)
    assert "fit(address=...)" in str(error)
