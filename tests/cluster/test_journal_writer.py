"""A journal that storage does not take is told while it lasts, before a save is due."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from elastic_train.cluster.controller.effects import Effects
from elastic_train.cluster.controller.journal_writer import JournalWriter
from elastic_train.control.events import Event, JournalDurable, JournalHeldUp
from elastic_train.storage.journal import Journal, read_journal
from elastic_train.storage.memory_store import MemoryStore
from elastic_train.testing.faulty_store import Fail, FaultyStore, Hold

pytestmark = pytest.mark.ring1


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_storage_that_gives_no_answer_is_told_once_and_so_is_its_return() -> None:
    inner, reached, go = MemoryStore(), threading.Event(), threading.Event()
    held = Hold(operation="create", call=2, reached=reached, go=go)
    journal = Journal(FaultyStore(inner, [held]), 1)
    journal.begin()  # the first slot is its own
    posted, faults, now = list[Event](), list[str](), [0.0]
    effects = Effects(fault=lambda what, error: faults.append(f"{what}: {error}"))
    writer = JournalWriter(journal, effects, wait_s=0.01, post=posted.append, clock=lambda: now[0])
    journal.append({"step": 1})
    writer.flush()
    until(reached.is_set)
    now[0] = 9.0
    writer.flush()
    assert posted == [], "slow is not trouble yet"
    now[0] = 11.0
    for _ in range(3):
        writer.flush()
    assert posted == [JournalHeldUp(at=0.0, problem="storage has not answered for 11 s")]
    go.set()
    until(lambda: len(posted) > 1)
    assert posted[1:] == [JournalDurable(at=0.0)]
    assert [line for _, part in read_journal(inner) for line in part] == [{"step": 1}]
    assert faults == []


def test_storage_that_refuses_is_told_at_the_first_refusal() -> None:
    posted, faults = list[Event](), list[str]()
    journal = Journal(FaultyStore(MemoryStore(), [Fail(operation="create", call=2)]), 1)
    journal.begin()
    effects = Effects(fault=lambda what, error: faults.append(f"{what}: {error}"))
    writer = JournalWriter(journal, effects, post=posted.append)
    journal.append({"step": 1})
    writer.flush()
    until(lambda: posted)
    (event,) = posted
    assert isinstance(event, JournalHeldUp)
    assert "create" in event.problem
    writer.flush()
    until(lambda: len(posted) > 1)
    assert posted[1:] == [JournalDurable(at=0.0)]
    assert faults == []
