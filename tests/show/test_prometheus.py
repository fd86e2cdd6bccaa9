"""What a real Prometheus makes of `/metrics`, and of the dashboard's questions."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from elastic_train.observe.journal_records import Record, to_json
from elastic_train.observe.metrics import METRICS, PREFIX, samples
from elastic_train.observe.run_summary import summary_of
from tests.show.scraping import BINARY, MISSING, scraping
from tests.show.test_server import served, written

pytestmark = [
    pytest.mark.ring1,
    pytest.mark.matrix,
    pytest.mark.skipif(BINARY is None, reason=MISSING),
]
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
SCRAPES_S = 3.0


def test_prometheus_takes_every_metric_with_its_value_and_answers_the_dashboard(
    tmp_path: Path, rough: list[Record]
) -> None:
    half = len(rough) // 2
    run, journal = written(tmp_path / "gpt", rough[:half])
    with (
        served(run, token="secret") as url,
        scraping(url.removeprefix("http://"), tmp_path / "prometheus", token="secret") as prometheus,
    ):
        before = prometheus.now()
        for record in rough[half:]:
            journal.append(to_json(record))
        journal.flush()
        time.sleep(SCRAPES_S)
        found = prometheus.now()
        told = summary_of(rough)
        for metric in METRICS:
            for labels, value in samples(metric, told, 60):
                said, suffix = dict(zip(metric.labels, labels, strict=True)), ""
                if metric.kind == "summary" and labels[0] in ("count", "sum"):
                    said, suffix = {}, f"_{labels[0]}"
                key = (PREFIX + metric.name + suffix, frozenset({"run": "gpt", **said}.items()))
                assert found.pop(key) == pytest.approx(value, nan_ok=True), key
        assert not found, "what Prometheus has and the journal has no more"
        kept = prometheus.seen('elastic_train_step{run="gpt"}', 60)
        assert kept == {before[f"{PREFIX}step", frozenset({("run", "gpt")})], 60.0}
        unanswered = [
            panel["title"]
            for panel in json.loads(DASHBOARD.read_text())["panels"]
            for target in panel.get("targets", ())
            if not prometheus.query(target["expr"].replace("$run", ".*"))
        ]
        assert unanswered == ["Time left"]  # of a run that is over
