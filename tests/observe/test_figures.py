"""What the figures, the timeline and the metrics of a run say, against the folds that they stand beside."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_train.control.changes import Change, ChangeKind
from elastic_train.control.events import (
    CheckpointCommitted,
    GroupReady,
    JournalDurable,
    JournalHeldUp,
    NodesChanged,
    PartWritten,
    StepCommitted,
)
from elastic_train.control.fault_schedule import DrainNode, KillNode, KillRank, Moment, storm
from elastic_train.observe.event_text import onset
from elastic_train.observe.finish_forecast import forecast
from elastic_train.observe.ledger import ledger
from elastic_train.observe.metrics import METRICS, PREFIX, samples
from elastic_train.observe.reconfigurations import history
from elastic_train.observe.run_summary import summary_of
from elastic_train.observe.timeline import HAPPENINGS, LANES, OPEN, SPANS, Timeline
from tests.observe.by_hand import assert_metrics_are_those_of

pytestmark = pytest.mark.ring0
ROOT = Path(__file__).parents[2]


def told(summary, max_steps: int = 15) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (metric.name, labels): value
        for metric in METRICS
        for labels, value in samples(metric, summary, max_steps)
    }


@pytest.mark.parametrize("seed", range(12))
def test_metrics_are_what_the_journal_says(recorded, seed):
    faults = storm(seed, steps=15, nodes=("a", "b", "c", "d"), ranks=4, faults=5).faults
    records = recorded(*faults, seed=seed, replicas=1 + seed % 2)
    summary, book, changes = summary_of(records), ledger(records), history(records)
    over = changes if summary.changes.current is None else changes[:-1]
    value = told(summary)
    assert value["steps_executed_total", ()] == len(book.executions)
    assert value["steps_lost_total", ()] == sum(change.lost for change in over)
    assert value["step", ()] == summary.progress.step
    causes = Counter(change.kind for change in over)
    assert {k[1][0]: v for k, v in value.items() if k[0] == "restarts_total"} == causes
    forced = [change for change in over if not change.graceful]
    assert value["interruptions_total", ()] == len(forced)
    if forced:
        recovery = sum(v for k, v in value.items() if k[0] == "recovery_seconds_total")
        whole = sum(change.seconds for change in forced if change.seconds is not None)
        assert recovery >= whole - 1e-6
        if all(change.seconds is not None for change in forced) and summary.changes.current is None:
            assert recovery == pytest.approx(whole)
    wall = value["wall_seconds", ()]
    badput = sum(v for k, v in value.items() if k[0] == "badput_seconds")
    assert value["productive_seconds", ()] + badput == pytest.approx(wall)
    commits = [r.event for r in records if isinstance(r.event, CheckpointCommitted)]
    assert value["checkpoints_total", ()] == len(commits)
    parts = [r.event for r in records if isinstance(r.event, PartWritten)]
    assert value["checkpoint_written_bytes_total", ()] == sum(part.bytes for part in parts)
    ready = [r.event for r in records if isinstance(r.event, GroupReady)]
    assert value["restored_bytes_total", ("other_nodes",)] == sum(event.far_bytes for event in ready)


def test_shares_means_and_quantiles_are_what_is_counted_by_hand(recorded):
    """That a real run's are as well is asked where one is scraped."""
    faults = (
        KillNode(when=Moment(step=4), node="b"),
        DrainNode(when=Moment(step=8), node="c", notice_s=30.0),
        KillRank(when=Moment(step=11), rank=1),
    )
    for replicas in (1, 2):
        records = recorded(*faults, replicas=replicas)
        found = told(summary_of(records))
        assert found["interruptions_total", ()] == 2
        assert found["restarts_total", ("drain",)] == 1
        assert_metrics_are_those_of(records, found)


def test_a_loss_is_one_clause_with_what_it_cost(recorded):
    summary = summary_of(recorded(KillNode(when=Moment(step=8), node="b"), replicas=2, seed=1))
    over = next(h for h in summary.timeline.happenings if h.kind.endswith("_over"))
    assert re.fullmatch(
        r"lost w0002 (on|with) node b: 4 -> [34] workers, 0 steps lost, \d+\.\d s", over.clause
    )
    assert over.nodes == ("b",)


def test_spans_lanes_and_curves_cover_the_run(recorded):
    records = recorded(
        KillRank(when=Moment(step=5), rank=1),
        DrainNode(when=Moment(step=11), node="a", notice_s=60.0),
        replicas=2,
    )
    line = summary_of(records).timeline
    assert [span.began for span in line.spans[1:]] == [span.ended for span in line.spans[:-1]]
    assert (line.began, line.now) == (records[0].seconds, records[-1].seconds)
    doing = {span.doing for span in line.spans}
    assert {"start", "training", "recovery", "switch"} <= doing
    lanes = {lane.node: lane for lane in line.lanes}
    seen = {n.name for r in records if isinstance(r.event, NodesChanged) for n in r.event.nodes}
    assert set(lanes) == seen
    assert "leaving" in {stretch.status for stretch in lanes["a"].stretches}
    assert all(s.ended != OPEN for lane in line.lanes for s in lane.stretches), "the run is over"
    assert sum(b[4] for b in line.loss.buckets) == len(ledger(records).executions)


def test_the_timeline_is_bounded(recorded):
    records = recorded(KillRank(when=Moment(step=5), rank=1))
    line = Timeline()
    for number in range(3000):
        for doing in ("training", "recovery"):
            line.add(records[number % len(records)], doing=doing, step=number, new=False, done=None)
        line._put(0.0, "x", 0, "x", "x", ())
        line.lanes = line.lanes[-LANES:]
    assert len(line.spans) <= SPANS
    assert len(line.happenings) == HAPPENINGS
    assert [h.number for h in line.since(line.count - 2)] == [line.count - 1, line.count]


def test_a_journal_that_waits_for_storage_is_trouble_until_it_is_written(recorded):
    (first, *_) = records = recorded(KillRank(when=Moment(step=5), rank=1))
    problem = "the journal can't be written: storage has not answered for 11 s"
    held_up = replace(
        first,
        event=JournalHeldUp(at=3.0, problem="storage has not answered for 11 s"),
        reason=problem,
        change=Change(kind="storage_trouble"),
        formed=None,
    )
    line = summary_of([*records[:20], held_up]).timeline
    assert line.troubled is not None
    assert line.troubled[1] == problem
    line.add(
        replace(held_up, event=JournalDurable(at=4.0), change=None),
        doing="training",
        step=3,
        new=False,
        done=None,
    )
    assert line.troubled is None
    assert line.happenings[-1].kind == "storage_back"


def test_the_end_is_forecast_with_a_range_while_the_run_trains(recorded):
    records = recorded(KillRank(when=Moment(step=5), rank=1))
    until = next(
        n for n, r in enumerate(records) if isinstance(r.event, StepCommitted) and r.event.step == 10
    )
    found = forecast(summary_of(records[: until + 1]), 15)
    assert found is not None
    assert found.earliest == 10.0
    assert found.earliest < found.expected < found.latest
    assert forecast(summary_of(records), 15) is None
    assert forecast(summary_of(()), 15) is None


def test_every_kind_of_change_has_a_clause():
    for kind in ChangeKind.__args__:
        assert onset(Change(kind=kind, nodes=("n",), workers=("w",)))


def test_metrics_keep_the_conventions_of_the_field():
    names = [PREFIX + metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.help.endswith("."), metric.name


def test_the_table_of_metrics_in_the_docs_is_that_of_the_code():
    rows = re.findall(
        r"^\| `(elastic_train_\w+)` \| (\w+) \| (.*?) \| (.+) \|$", DOC.read_text(), re.MULTILINE
    )
    assert rows == [
        (PREFIX + m.name, m.kind, ", ".join(f"`{label}`" for label in m.labels), m.help) for m in METRICS
    ]


DOC = ROOT / "docs" / "metrics.md"


def test_the_dashboard_asks_for_metrics_that_there_are_and_its_panels_do_not_overlap():
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    known = {PREFIX + metric.name: metric for metric in METRICS}
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
        for target in panel["targets"]:
            (name,) = re.findall(r"elastic_train_\w+", target["expr"])
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert labels <= {"run", *known[name].labels}, target
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
