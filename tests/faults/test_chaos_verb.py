"""A run that `elastic-train chaos` breaks while it trains: its metrics are what its journal says."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic_train.cli.report_and_ui import Reading
from elastic_train.cluster.driver.launch import fit
from elastic_train.config import Checkpoints
from elastic_train.control.events import FaultInjected
from elastic_train.errors import StorageNotFound
from elastic_train.observe.journal_records import Record
from elastic_train.show.exposition import exposition
from elastic_train.storage.fsspec_store import child_url
from elastic_train.testing.slow_samples import SlowSamples
from jobs.pretrain_lm import Pretrain
from tests.faults.conftest import WHOLE, Runs
from tests.observe.by_hand import assert_metrics_are_those_of
from tests.show.scraping import BINARY, Prometheus, scraping
from tests.show.test_server import served

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(400)]
NODES, CPUS = 3, 1
STEPS = 96
SCRAPES_S = 3.0


class Slow(Pretrain):
    def dataset(self) -> SlowSamples:
        return SlowSamples(super().dataset(), 0.12)


class Person(threading.Thread):
    """Runs commands on a run, each once it has come to a step, and has Prometheus scrape it where there is
    one.
    """

    def __init__(
        self, url: str, address: str, plan: list[tuple[int, tuple[str, ...]]], watch: ExitStack, scrapes: Path
    ) -> None:
        super().__init__(daemon=True)
        self._url, self._address, self._plan = url, address, plan
        self._watch, self._scrapes = watch, scrapes
        self.said: list[str] = []
        self.prometheus: Prometheus | None = None

    def run(self) -> None:
        while BINARY is not None and not self._came_to(1):
            time.sleep(0.2)
        if BINARY is not None:
            page = self._watch.enter_context(served(self._url))
            self.prometheus = self._watch.enter_context(scraping(page.removeprefix("http://"), self._scrapes))
        for step, (verb, *rest) in self._plan:
            while not self._came_to(step):
                time.sleep(0.2)
            words = ["ckpt", "save", self._url] if verb == "save" else ["chaos", self._url, verb, *rest]
            if verb != "save":
                words += ["--address", self._address, "--seed", "1"]
            command = [str(Path(sys.executable).parent / "elastic-train"), *words]
            done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
            self.said.append(done.stdout + done.stderr)

    def _came_to(self, step: int) -> bool:
        try:
            return Reading(self._url).look().told.progress.step >= step
        except StorageNotFound:  # its journal has not begun
            return False


@pytest.fixture
def watch() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_what_chaos_does_is_in_the_journal_and_the_metrics_count_it(
    runs: Runs, watch: ExitStack, tmp_path: Path
) -> None:
    task, spec = runs.spec(
        "seen", max_steps=STEPS, workers="1:3", timing=WHOLE, checkpoints=Checkpoints(every=20, keep=2)
    )
    url = child_url(spec.storage_path, spec.name)
    plan = [(6, ("cut", "--rank", "1")), (12, ("kill",)), (18, ("save",)), (24, ("drain", "--seconds", "4"))]
    person = Person(url, str(runs.cluster.cluster.address), plan, watch, tmp_path / "prometheus")
    person.start()
    result = fit(Slow(**vars(task)), spec, address=None, local_nodes=0, quiet=False)
    person.join(60)
    print("\n".join(person.said))
    assert result.outcome == "finished"
    records = runs.records("seen")
    injected = [r.event for r in records if isinstance(r.event, FaultInjected)]
    assert [event.what.split()[0] for event in injected] == ["cut", "kill", "drain"]
    shown = Reading(url).look()
    found = {
        (
            sample.name.removeprefix("elastic_train_"),
            tuple(v for k, v in sorted(sample.labels.items()) if k != "run"),
        ): sample.value
        for family in text_string_to_metric_families(exposition([shown]).decode())
        for sample in family.samples
    }
    assert_metrics_are_those_of(records, found)
    assert found["step", ()] == STEPS
    assert found["interruptions_total", ()] >= 2
    assert found["restarts_total", ("drain",)] == 1
    assert found["checkpoints_total", ()] >= 3
    assert found["restored_bytes_total", ("own_node",)] + found["restored_bytes_total", ("other_nodes",)] > 0
    assert found["learning_rate", ("0",)] > 0
    if person.prometheus is not None:
        time.sleep(SCRAPES_S)
        scraped = {
            (name.removeprefix("elastic_train_"), tuple(v for k, v in sorted(labels) if k != "run")): value
            for (name, labels), value in person.prometheus.now().items()
        }
        assert scraped == pytest.approx(found, nan_ok=True)
        assert {2.0, 3.0} <= person.prometheus.seen("elastic_train_world_size", 600)
        checkpoints = person.prometheus.seen("elastic_train_checkpoints_total", 600)
        assert len(checkpoints) > 1
        assert max(checkpoints) == found["checkpoints_total", ()]
        assert_plans_and_ends_were_told(person.prometheus, records)


def assert_plans_and_ends_were_told(prometheus: Prometheus, records: list[Record]) -> None:
    """While it trained: each plan that was told is one that was formed, and the time left has a range."""
    formed = {record.formed.plan for record in records if record.formed is not None}
    told = [dict(labels)["plan"] for labels in prometheus.past("elastic_train_plan_info", 600)]
    assert len(told) > 1
    assert all(any(plan.startswith(mesh) for plan in formed) for mesh in told), (told, formed)
    bounds = {
        dict(labels)["bound"]: values
        for labels, values in prometheus.past("elastic_train_eta_seconds", 600).items()
    }
    times = bounds["earliest"].keys() & bounds["expected"].keys() & bounds["latest"].keys()
    assert len(times) > 3
    for at in times:
        assert 0 <= bounds["earliest"][at] <= bounds["expected"][at] <= bounds["latest"][at]
