"""The journal means what its last writer took it to mean, whatever ousted writers still try."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.errors import AlreadyExists, Fenced, FormatUnsupported, StorageError
from elastic_train.storage.commit_log import CommitLog
from elastic_train.storage.journal import Journal, read_journal
from elastic_train.storage.journal_parts import part_path
from elastic_train.storage.memory_store import MemoryStore
from elastic_train.storage.store import Buffer, Store
from elastic_train.testing.faulty_store import Fail, FaultyStore, Hold

pytestmark = pytest.mark.ring1


def reported(store: Store) -> list[object]:
    return [record["n"] for _, records in read_journal(store) for record in records]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["append", "flush", "begin"])), max_size=40))
def test_what_a_term_began_from_stays_what_lies_before_its_own_words(acts: list[tuple[int, str]]) -> None:
    """Writers of several terms in any order of acts: nothing of an ousted one comes in between or after."""
    store = MemoryStore()
    log = CommitLog(store)
    writers: list[Journal] = []
    taken: list[list[object]] = []  # what each term began from
    for number, (which, act) in enumerate(acts):
        if act == "begin" or not writers:
            writers.append(Journal(store, log.begin_term("x")))
            taken.append([record["n"] for part in writers[-1].begin().parts for record in part.records])
            continue
        term = min(which, len(writers) - 1) + 1
        if act == "append":
            writers[term - 1].append({"n": [term, number]})
            continue
        if term < len(writers) and writers[term - 1].waiting:
            with pytest.raises(Fenced):
                writers[term - 1].flush()
        else:
            writers[term - 1].flush()
    final = reported(store)
    for term, before in enumerate(taken, start=1):
        assert final[: len(before)] == before
        assert all(entry[0] >= term for entry in final[len(before) :] if isinstance(entry, list))


def test_a_flush_that_is_under_way_while_the_next_term_begins_is_void() -> None:
    store = MemoryStore()
    hold = Hold(operation="create", call=2, reached=threading.Event(), go=threading.Event())
    first = Journal(FaultyStore(store, [hold]), 1)
    first.begin()
    first.append({"n": "late"})
    ended: list[int] = []

    def flush() -> None:
        try:
            first.flush()
        except Fenced as error:
            ended.append(error.by_term)

    thread = threading.Thread(target=flush)
    thread.start()
    hold.reached.wait()
    second = Journal(store, 2)
    assert [part.records for part in second.begin().parts] == [[]]
    hold.go.set()
    thread.join()
    second.append({"n": "in time"})
    second.flush()
    assert ended == [2]
    assert reported(store) == ["in time"]
    with pytest.raises(Fenced):
        first.flush()


def test_a_fence_in_the_commit_log_is_enough_to_end_a_writer() -> None:
    store = MemoryStore()
    log = CommitLog(store)
    first = Journal(store, log.begin_term("a"))
    first.append({"n": 1})
    first.flush()
    CommitLog(store).begin_term("b")
    first.append({"n": 2})
    with pytest.raises(Fenced, match="term 2 owns the run"):
        first.flush()
    assert reported(store) == [1]


class Deaf(MemoryStore):
    """Takes what is created, and the answer is lost."""

    lost = 0

    def create(self, path: str, data: Buffer) -> None:
        super().create(path, data)
        if self.lost:
            self.lost -= 1
            raise AlreadyExists(path=path, operation="create", problem="the second try found the first.")


def test_a_part_whose_answer_was_lost_is_not_written_twice() -> None:
    store = Deaf()
    journal = Journal(store, 1)
    store.lost = 1
    journal.begin()
    journal.append({"n": 1})
    store.lost = 1
    journal.flush()
    journal.append({"n": 2})
    journal.flush()
    assert reported(store) == [1, 2]


def test_after_an_error_of_storage_the_lines_wait_for_the_next_flush() -> None:
    store = MemoryStore()
    journal = Journal(FaultyStore(store, [Fail(operation="create", call=2)]), 1)
    journal.begin()
    journal.append({"n": 1})
    with pytest.raises(StorageError):
        journal.flush()
    journal.append({"n": 2})
    assert journal.waiting == 2
    journal.flush()
    assert journal.waiting == 0
    assert reported(store) == [1, 2]


def test_reading_goes_on_after_a_part() -> None:
    store = MemoryStore()
    journal = Journal(store, 1)
    for n in range(3):
        journal.append({"n": n})
        journal.flush()
    (first, _), *_ = read_journal(store)
    assert [records for _, records in read_journal(store, first)] == [[{"n": 1}], [{"n": 2}]]


def test_a_part_that_cannot_be_read_is_named() -> None:
    store = MemoryStore()
    store.write(part_path(1), b"{}\n")
    with pytest.raises(StorageError, match=r"cannot understand .*00000001"):
        list(read_journal(store))
    store.write(part_path(1), b'{"format":"elastic_train.journal/99"}\n')
    with pytest.raises(FormatUnsupported, match="Upgrade"):
        list(read_journal(store))
