"""What a journal says of the metrics, counted in another way than by their own fold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from elastic_train.control.events import (
    CheckpointCommitted,
    GroupReady,
    PartWritten,
    PeersHeld,
    SaveFailed,
    StepCommitted,
)
from elastic_train.observe.journal_records import Record
from elastic_train.observe.ledger import ledger
from elastic_train.observe.reconfigurations import history

Found = dict[tuple[str, tuple[str, ...]], float]
"""By a metric's name without its prefix, and its labels."""


def middle(seconds: Sequence[float], share: float = 0.5) -> float:
    return sorted(seconds)[int(share * (len(seconds) - 1))]


def by_hand(records: Sequence[Record]) -> Found:
    """Of a run that has ended, and was recovered after its last interruption."""
    book, changes = ledger(records), history(records)
    forced = [change for change in changes if not change.graceful]
    seconds = [entry.seconds for entry in book.executions]
    events = [record.event for record in records]
    ready = [event for event in events if isinstance(event, GroupReady)]
    commits = [event for event in events if isinstance(event, CheckpointCommitted)]
    parts = [event for event in events if isinstance(event, PartWritten)]
    found: Found = {
        ("step", ()): len(book.kept),
        ("steps_executed_total", ()): len(seconds),
        ("steps_lost_total", ()): sum(change.lost for change in changes),
        ("steps_skipped_total", ()): sum(entry.skipped for entry in book.executions),
        ("interruptions_total", ()): len(forced),
        ("wall_seconds", ()): records[-1].seconds - records[0].seconds,
        ("checkpoints_total", ()): len(commits),
        ("checkpoint_step", ()): max(commit.stored.step for commit in commits),
        ("checkpoint_failures_total", ()): sum(isinstance(event, SaveFailed) for event in events),
        ("checkpoint_written_bytes_total", ()): sum(part.bytes for part in parts),
        ("restored_bytes_total", ("own_node",)): sum(event.near_bytes for event in ready),
        ("restored_bytes_total", ("other_nodes",)): sum(event.far_bytes for event in ready),
        ("world_size", ()): 0,  # it is over
        ("storage_trouble", ()): 0,
    }
    found |= {("snapshot_bytes", (kind,)): total for kind, total in held(records).items()}
    restarts = Counter(change.kind or "unknown" for change in changes)
    return found | {("restarts_total", (kind,)): number for kind, number in restarts.items()}


def held(records: Sequence[Record]) -> Counter[str]:
    """Bytes in the memory of the last group's nodes, by kind."""
    newest: dict[str, PeersHeld] = {}
    for record in records:
        if isinstance(record.event, PeersHeld):
            newest[record.event.node] = record.event
        if record.formed is not None:
            newest = {node: newest[node] for node in record.formed.nodes if node in newest}
    kinds = ("own", "copies", "spilled")
    return Counter({kind: sum(getattr(event, kind) for event in newest.values()) for kind in kinds})


def stalled(records: Sequence[Record]) -> tuple[float, float]:
    """Seconds by which steps after a snapshot were longer than the median one until it was committed. And by
    how much that may differ: the median is known within 2 %.
    """
    steps: dict[int, float] = {}
    every: list[float] = []
    total, slack = 0.0, 1e-9
    for record in records:
        if isinstance(record.event, StepCommitted):
            steps[record.event.step] = record.event.seconds
            every.append(record.event.seconds)
        elif isinstance(record.event, CheckpointCommitted) and every:
            usual = middle(every)
            after = [spent for step, spent in steps.items() if step > record.event.stored.step]
            total += sum(max(0.0, spent - usual) for spent in after)
            slack += 0.021 * usual * len(after)
    return total, slack


def assert_metrics_are_those_of(records: Sequence[Record], found: Found) -> None:
    """Everything that is counted, and the shares and means that follow from it."""
    expected = by_hand(records)
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert {key for key in found if key[0] == "restarts_total"} <= expected.keys()
    book, changes = ledger(records), history(records)
    forced = [change for change in changes if not change.graceful]
    seconds = [entry.seconds for entry in book.executions]
    kept, wall = found["productive_seconds", ()], found["wall_seconds", ()]
    assert found["goodput_ratio", ()] == pytest.approx(kept / wall)
    badput = {labels: value for (name, labels), value in found.items() if name == "badput_seconds"}
    assert kept + sum(badput.values()) == pytest.approx(wall)
    again = badput.get(("steps_run_again",), 0.0)
    if forced:
        assert found["mtti_seconds", ()] == pytest.approx((kept + again) / len(forced))
        for phase in ("settle", "wait", "form", "first_step"):
            spent = found.get(("recovery_seconds_total", (phase,)), 0.0)
            mean = found.get(("mttr_seconds", (phase,)), 0.0)
            assert mean == pytest.approx(spent / len(forced)), phase
        whole = sum(change.seconds or 0.0 for change in forced)
        spent = sum(value for (name, _), value in found.items() if name == "recovery_seconds_total")
        assert spent == pytest.approx(whole)
    for share in (0.5, 0.9, 0.99):
        assert found["step_seconds", (str(share),)] == pytest.approx(middle(seconds, share), rel=0.021)
    stall, slack = stalled(records)
    assert found["save_stall_seconds_total", ()] == pytest.approx(stall, abs=slack)
