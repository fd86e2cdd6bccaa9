"""Whom a fault on demand hits, and what the journal is told of it."""

from __future__ import annotations

import random

import pytest

from elastic_train.cluster.controller.request_watch import RequestWatch
from elastic_train.cluster.faults.on_demand import ACTIONS, Action, target
from elastic_train.control.events import Event, FaultInjected
from elastic_train.errors import ConfigError
from elastic_train.observe.journal_records import FormedGroup
from elastic_train.storage.memory_store import MemoryStore
from elastic_train.storage.run_requests import note_fault

pytestmark = pytest.mark.ring0
GROUP = FormedGroup(
    generation=3, step=7, source="live", mesh="dp 3", dp=3, workers=("w1", "w2", "w5"), nodes=("a", "a", "b")
)


@pytest.mark.parametrize(
    ("action", "asked", "hit"),
    [
        ("kill", {"worker": "w2"}, "w2 on node a"),
        ("stop", {"rank": 2}, "w5 on node b"),
        ("cut", {"rank": 0}, "w1 on node a"),
        ("kill", {"node": "b"}, "node b"),
        ("drain", {"node": "a"}, "node a"),
        ("drain", {"worker": "w5"}, "node b"),
        ("drain", {"rank": 1}, "node a"),
    ],
)
def test_who_is_named_is_hit(action: Action, asked: dict[str, str], hit: str) -> None:
    assert str(target(GROUP, action, random.Random(0), **asked)) == hit


@pytest.mark.parametrize("action", ACTIONS)
def test_who_is_not_named_is_drawn_of_those_that_train_again_with_the_same_seed(action: Action) -> None:
    drawn = [[str(target(GROUP, action, random.Random(seed))) for seed in range(40)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == (2 if action == "drain" else 3)
    assert str(target(GROUP, "kill", random.Random(0), node="random")) in ("node a", "node b")


@pytest.mark.parametrize(
    ("action", "asked", "problem"),
    [
        ("kill", {"worker": "w9"}, r"There are w1 \(rank 0\)"),
        ("kill", {"rank": 3}, "no such worker"),
        ("drain", {"node": "c"}, "It is one of a, b"),
        ("cut", {"node": "a"}, "Name a worker"),
        ("kill", {"worker": "w1", "rank": 0}, "takes one of"),
    ],
)
def test_who_is_not_there_is_refused_by_name(action: Action, asked: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        target(GROUP, action, random.Random(0), **asked)


def test_a_fault_is_told_to_the_journal_once_and_in_its_term_alone() -> None:
    store, heard = MemoryStore(), list[Event]()
    watch = RequestWatch(store, 2, heard.append)
    note_fault(store, 1, "kill w0 on node a")
    note_fault(store, 2, "kill w1 on node a", nodes=("a",), workers=("w1",))
    note_fault(store, 2, "drain node b", nodes=("b",))
    watch.look()
    watch.look()
    assert heard == [
        FaultInjected(at=0.0, what="kill w1 on node a", nodes=("a",), workers=("w1",)),
        FaultInjected(at=0.0, what="drain node b", nodes=("b",)),
    ]


@pytest.mark.parametrize("said", [b"{}", b"\xff", b"[]", b'{"what": "kill", "nodes": 5, "workers": []}'])
def test_a_note_that_is_none_is_named_once_and_hides_no_other(
    said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store, heard = MemoryStore(), list[Event]()
    store.write("faults/t000001/000000.json", said)
    note_fault(store, 1, "drain node b", nodes=("b",))
    watch = RequestWatch(store, 1, heard.append)
    watch.look()
    watch.look()
    assert heard == [FaultInjected(at=0.0, what="drain node b", nodes=("b",))]
    assert caplog.text.count("000000.json is passed over") == 1
