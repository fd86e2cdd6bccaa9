"""What is read of a journal at a start doesn't grow with its age, and nothing of what happened gets lost."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.errors import Fenced, StorageError
from elastic_train.storage.commit_log import CommitLog
from elastic_train.storage.compacted_journal import DIRECTORY as HISTORY
from elastic_train.storage.compacted_journal import spans
from elastic_train.storage.journal import Journal, read_journal
from elastic_train.storage.journal_parts import part_path, slots
from elastic_train.storage.journal_reading import covering_path, coverings, newest_covering
from elastic_train.storage.memory_store import MemoryStore
from elastic_train.storage.store import Store
from elastic_train.testing.faulty_store import Fail, FaultyStore

pytestmark = pytest.mark.ring1


def told(store: Store, after: str = "") -> list[int]:
    return [record["n"] for _, records in read_journal(store, after) for record in records]


def known(store: Store, term: int) -> list[int]:
    """What a new term takes to have happened: the state here is the list of all numbers."""
    past = Journal(store, term).begin()
    before = past.covering.said["all"] if past.covering is not None else []
    return [*before, *(record["n"] for part in past.parts for record in part.records)]


class Counted(Journal):
    """Its state is the list of what was appended."""

    def __init__(self, store: Store, term: int, **options: int) -> None:
        super().__init__(store, term, **options)
        self.all: list[int] = []

    def take_over(self) -> None:
        past = self.begin()
        before = past.covering.said["all"] if past.covering is not None else []
        self.all = [*before, *(record["n"] for part in past.parts for record in part.records)]

    def tell(self, n: int) -> None:
        self.all.append(n)
        self.append({"n": n})

    def cover(self) -> None:
        self.keep({"all": list(self.all)})


ACTS = st.lists(st.sampled_from(["tell", "flush", "cover", "restart", "fail"]), max_size=60)


@given(ACTS)
def test_states_and_the_rest_tell_the_same_as_everything(acts: list[str]) -> None:
    """Whatever of it fails in between, at whatever operation."""
    store = MemoryStore()
    log = CommitLog(store)
    journal = Counted(store, log.begin_term("x"))
    journal.take_over()
    durable: list[int] = []
    for number, act in enumerate(acts):
        if act == "tell":
            journal.tell(number)
        elif act == "cover":
            journal.cover()
        elif act == "restart":  # the process died: what waited is gone
            journal = Counted(store, log.begin_term("x"))
            journal.take_over()
            assert journal.all == durable
        else:
            fault = Fail(
                operation=("create", "write", "delete", "read", "list")[number % 5], call=1 + number % 3
            )
            journal._store = FaultyStore(store, [fault]) if act == "fail" else store
            try:
                journal.flush()
            except StorageError:
                continue
            finally:
                journal._store = store
                durable = told(store)
            assert durable == journal.all
    journal.flush()
    assert told(store) == journal.all == known(store, log.begin_term("x"))


def aged(store: Store, term: int = 1, *, flushes: int = 30, every: int = 10) -> Counted:
    journal = Counted(store, term)
    journal.take_over()
    for n in range(flushes):
        journal.tell(len(journal.all))
        if n % every == every - 1:
            journal.cover()
        journal.flush()
    return journal


def test_parts_before_a_state_are_compacted_and_still_told_in_order() -> None:
    store = MemoryStore()
    journal = aged(store, flushes=35)
    assert slots(store)[0] == 31  # the last one that the newest state covers stays
    assert coverings(store) == [21, 31]
    assert spans(store) == [(1, 10), (11, 20), (21, 30)]
    assert journal.uncovered == 5
    assert told(store) == list(range(35))
    assert told(store, part_path(14)) == list(range(13, 35))
    assert known(store, 2) == list(range(35))


def test_a_start_reads_a_state_and_what_came_after_it() -> None:
    class Reads(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.counts = Counter[str]()

        def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
            self.counts[path.partition("/")[0]] += 1
            return super().read(path, start, length)

    found = []
    for flushes in (105, 1005):
        store = Reads()
        aged(store, flushes=flushes, every=50)
        store.counts.clear()
        assert known(store, 2) == list(range(flushes))
        found.append(store.counts)
    assert found[0] == found[1]
    assert found[0][HISTORY] == 0
    assert found[0]["journal"] <= 10


def test_an_ousted_writer_finds_no_slot_of_what_was_compacted() -> None:
    store = MemoryStore()
    ousted = Counted(store, 1)
    ousted.take_over()
    ousted.tell(-1)
    aged(store, 2, flushes=40)
    before = told(store)
    ousted.flush()  # it gets slots that are empty again, and none that counts
    assert part_path(2) in store.list()
    for _ in range(40):
        ousted.tell(-1)
        with suppress(Fenced):
            ousted.flush()
    with pytest.raises(Fenced):
        ousted.flush()
    assert told(store) == before
    assert known(store, 3) == before


def test_a_reader_goes_on_while_what_it_listed_is_compacted() -> None:
    store = MemoryStore()
    journal = aged(store, flushes=100, every=1000)
    reading = read_journal(store)
    seen = [record["n"] for _, records in (next(reading), next(reading)) for record in records]
    journal.cover()
    journal.tell(100)
    journal.flush()
    seen += [record["n"] for _, records in reading for record in records]
    assert seen == list(range(101))


def test_a_state_that_cannot_be_read_is_passed_over() -> None:
    store = MemoryStore()
    aged(store, flushes=35)
    store.write(covering_path(31), b"{")
    found = newest_covering(store)
    assert found is not None
    assert found.slot == 21
    assert known(store, 2) == list(range(35))


def test_a_slot_that_is_missing_is_an_error_that_names_it() -> None:
    store = MemoryStore()
    aged(store, flushes=8, every=100)
    store.delete([part_path(4)])
    with pytest.raises(StorageError, match="slot 4 is missing"):
        told(store)


def test_what_waits_for_storage_is_bounded_and_the_state_is_whole() -> None:
    store = MemoryStore()
    journal = Counted(store, 1, waiting_bytes=500)
    journal.take_over()
    journal.tell(0)
    journal.flush()
    journal._store = FaultyStore(store, [Fail(operation="create")])
    for n in range(1, 301):
        journal.tell(n)
        if n % 50 == 0:
            journal.cover()
        with pytest.raises(StorageError):
            journal.flush()
        assert journal.waiting <= 100
    journal._store = store
    journal.tell(301)
    journal.flush()
    assert journal.given_up > 200
    assert told(store) == [0, 301]
    assert known(store, 2) == list(range(302))


def test_appending_goes_on_beside_a_flush_from_another_thread() -> None:
    store = MemoryStore()
    journal = Counted(store, 1, waiting_bytes=2000)
    journal.take_over()
    over = threading.Event()

    def flush() -> None:
        while not over.is_set():
            journal.flush()

    thread = threading.Thread(target=flush)
    thread.start()
    for n in range(5000):
        journal.tell(n)
        if n % 97 == 0:
            journal.cover()
    over.set()
    thread.join()
    journal.flush()
    assert known(store, 2) == list(range(5000))
    assert len(told(store)) == 5000 - journal.given_up
