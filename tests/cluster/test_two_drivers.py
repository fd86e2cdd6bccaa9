"""Two drivers of one run that begin at the same moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from elastic_train.cluster.actor_names import NAMESPACE, controller_name, run_key
from elastic_train.cluster.driver import launch
from elastic_train.cluster.driver.takeover import take_over
from elastic_train.cluster.ray_calls import remote
from elastic_train.cluster.run_updates import Driven
from elastic_train.config import Batch, RunSpec
from elastic_train.errors import LeaseHeld

pytestmark = [pytest.mark.ring3, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        "local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000
    )
    yield
    ray.shutdown()


class Rival:
    """A controller whose driver is heard now and then."""

    asked = 0

    def driven(self) -> Driven:
        self.asked += 1
        return Driven(driver="pid 7 on another", silent_s=1.0 / self.asked, ended=False)


def test_the_driver_that_finds_the_name_taken_in_the_end_is_refused_as_any_other(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody was there when it looked."""
    spec = RunSpec(
        name="run",
        storage_path=str(tmp_path),
        batch=Batch(global_size=4, micro_size=1),
        max_steps=9,
        min_workers=1,
        max_workers=1,
    )
    name, rivals = controller_name(run_key(spec.storage_path, spec.name)), list[Any]()

    def looked(run: str, spec: RunSpec) -> None:
        take_over(run, spec)
        if not rivals:
            made = remote(Rival, num_cpus=0).options(name=name, namespace=NAMESPACE, lifetime="detached")
            rivals.append(made.remote())
            ray.get(rivals[0].driven.remote(), timeout=100)

    monkeypatch.setattr(launch, "take_over", looked)
    with pytest.raises(LeaseHeld, match="pid 7 on another"):
        launch._start(spec, b"", None, None)  # pyright: ignore[reportArgumentType, reportPrivateUsage]
    ray.kill(rivals[0])
