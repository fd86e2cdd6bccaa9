"""What every store must do: subclass it in a test file and give it a `store` fixture with an empty store."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import pytest

from elastic_train.errors import AlreadyExists, Fenced, StorageError, StorageNotFound
from elastic_train.storage.commit_log import CommitLog
from elastic_train.storage.journal import Journal, read_journal
from elastic_train.storage.store import Store

ODD = "ü = 1+2 #3/run 4/a b?x=[1]*%20ç/w.bin"


class StoreContract:
    """The contract. Tests share nothing: each writes under paths of its own."""

    def blind(self, store: Store, directory: str) -> AbstractContextManager[Store]:
        """The store, or one with the same objects, that can't list a directory and is told so."""
        pytest.skip("nothing can keep this store from listing")

    def test_what_is_written_is_read_and_replaced_whole(self, store: Store) -> None:
        store.write("whole/a", b"one")
        assert store.read("whole/a") == b"one"
        store.write("whole/a", memoryview(b"a longer second"))
        assert store.read("whole/a") == b"a longer second"
        assert store.size("whole/a") == 15
        assert store.exists("whole/a")

    def test_an_empty_object_is_an_object(self, store: Store) -> None:
        store.write("empty/a", b"")
        with store.stream("empty/b"):
            pass
        assert [store.read(p) for p in ("empty/a", "empty/b")] == [b"", b""]
        assert [store.size(p) for p in ("empty/a", "empty/b")] == [0, 0]

    def test_ranges_come_back_in_order_and_exactly(self, store: Store) -> None:
        store.write("ranges/a", bytes(range(200)))
        assert store.read("ranges/a", 10, 3) == bytes([10, 11, 12])
        assert store.read("ranges/a", 198) == bytes([198, 199])
        got = store.read_ranges("ranges/a", [(100, 2), (0, 1), (5, 0), (199, 1)])
        assert got == [bytes([100, 101]), bytes([0]), b"", bytes([199])]
        assert store.read_ranges("ranges/a", []) == []

    def test_a_range_fills_buffers_one_after_the_other(self, store: Store) -> None:
        store.write("into/a", bytes(range(200)))
        memory = bytearray(10)
        view = memoryview(memory)
        store.read_into("into/a", 100, [view[6:10], view[0:0], view[0:2]])
        assert memory == bytes([104, 105, 0, 0, 0, 0, 100, 101, 102, 103])
        store.read_into("into/a", 5, [])
        with pytest.raises(StorageError):
            store.read_into("into/a", 195, [view])
        with pytest.raises(StorageNotFound):
            store.read_into("into/gone", 0, [view])

    def test_a_range_beyond_the_end_is_an_error_and_not_a_short_block(self, store: Store) -> None:
        store.write("short/a", b"12345")
        with pytest.raises(StorageError):
            store.read("short/a", 3, 10)
        with pytest.raises(StorageError):
            store.read("short/a", 5, 1)

    def test_what_is_not_there_is_named_as_such(self, store: Store) -> None:
        with pytest.raises(StorageNotFound, match="gone"):
            store.read("gone")
        with pytest.raises(StorageNotFound):
            store.read_ranges("gone", [(0, 1), (1, 1)])
        with pytest.raises(StorageNotFound):
            store.size("gone")
        assert not store.exists("gone")
        store.write("gone-not/a", b"x")
        assert not store.exists("gone-not")
        with pytest.raises(StorageNotFound):
            store.size("gone-not")

    def test_a_create_wins_once(self, store: Store) -> None:
        store.create("once/a", b"first")
        with pytest.raises(AlreadyExists):
            store.create("once/a", b"second")
        with pytest.raises(AlreadyExists):
            store.create("once/a", b"first")
        assert store.read("once/a") == b"first"

    def test_of_many_racing_creates_exactly_one_wins(self, store: Store) -> None:
        won: list[bytes] = []
        start = threading.Barrier(8)

        def race(name: bytes) -> None:
            start.wait()
            try:
                store.create("race/a", name)
            except AlreadyExists:
                return
            won.append(name)

        threads = [threading.Thread(target=race, args=(b"%d" % i,)) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert won == [store.read("race/a")]

    def test_a_stream_appears_whole_at_its_end(self, store: Store) -> None:
        block = bytes(range(256)) * 4096
        with store.stream("stream/a") as sink:
            for _ in range(18):  # 18 MiB: more than one part of an upload
                sink.write(block)
            sink.write(memoryview(b"end"))
            assert not store.exists("stream/a")
            assert store.list("stream") == []
        assert store.size("stream/a") == 18 * len(block) + 3
        assert store.read("stream/a", 17 * len(block) + 5, 4) == bytes([5, 6, 7, 8])
        assert store.read("stream/a", 18 * len(block)) == b"end"

    def test_a_stream_that_fails_leaves_nothing(self, store: Store) -> None:
        for size in (10, 20 << 20):
            with pytest.raises(ZeroDivisionError):
                fail_half_way(store, "failed/a", bytes(size))
        assert store.list("failed") == []
        assert not store.exists("failed/a")
        assert [p for p in store.unfinished("failed") if p != "failed"] == []

    def test_a_stream_that_fails_leaves_what_was_there(self, store: Store) -> None:
        store.write("kept/a", b"old")
        with pytest.raises(ZeroDivisionError):
            fail_half_way(store, "kept/a", b"new")
        assert store.read("kept/a") == b"old"
        with store.stream("kept/a") as sink:
            sink.write(b"new")
        assert store.read("kept/a") == b"new"

    def test_listing_is_recursive_sorted_and_by_directory(self, store: Store) -> None:
        for path in ("list/b/2", "list/b/10", "list/a", "list-not/c"):
            store.write(path, b"x")
        assert store.list("list") == ["list/a", "list/b/10", "list/b/2"]
        assert store.list("list/b/") == ["list/b/10", "list/b/2"]
        assert store.list("nothing") == []
        assert store.names("list") == ["a"]
        assert store.names("list/b/") == ["10", "2"]
        assert store.names("nothing") == store.names("list/a") == []
        assert set(store.list()) >= {"list/a", "list-not/c"}

    def test_a_directory_that_cannot_be_listed_is_an_error_and_never_empty(self, store: Store) -> None:
        for path in ("seen/a/1", "seen/b/2"):
            store.write(path, b"x")
        with self.blind(store, "seen/b") as seen:
            for prefix in ("seen", "seen/b", ""):
                with pytest.raises(StorageError) as raised:
                    seen.list(prefix)
                assert not isinstance(raised.value, StorageNotFound)
            with pytest.raises(StorageError):
                seen.names("seen/b")
        assert store.list("seen") == ["seen/a/1", "seen/b/2"]

    def test_odd_paths_are_themselves(self, store: Store) -> None:
        store.create(ODD, b"odd")
        with store.stream(ODD + "2") as sink:
            sink.write(b"odd too")
        assert store.read(ODD) == b"odd"
        assert store.read_ranges(ODD + "2", [(0, 3), (4, 3)]) == [b"odd", b"too"]
        directory = ODD.rpartition("/")[0]
        assert store.list(directory) == [ODD, ODD + "2"]
        store.delete([ODD])
        assert store.list(directory) == [ODD + "2"]
        store.delete_tree(directory)
        assert store.list(directory) == []

    def test_paths_that_leave_the_store_are_refused(self, store: Store) -> None:
        for path in ("", "/a", "a//b", "a/", "../a", "a/./b", ".tmp-x"):
            with pytest.raises(StorageError):
                store.write(path, b"x")

    def test_deleting_twice_is_free(self, store: Store) -> None:
        for path in ("delete/a", "delete/b/c", "delete/b/d", "delete-not/e"):
            store.write(path, b"x")
        store.delete(["delete/a", "delete/a", "delete/never"])
        store.delete([])
        assert store.list("delete") == ["delete/b/c", "delete/b/d"]
        store.delete_tree("delete")
        store.delete_tree("delete")
        assert store.list("delete") == []
        assert store.exists("delete-not/e")

    def test_a_journal_takes_nothing_of_an_ousted_term(self, store: Store) -> None:
        log = CommitLog(store)
        first = Journal(store, log.begin_term("first"))
        first.begin()
        first.append({"n": 1})
        first.flush()
        first.append({"n": "too late"})
        second = Journal(store, log.begin_term("second"))
        assert [r for part in second.begin().parts for r in part.records] == [{"n": 1}]
        with pytest.raises(Fenced):
            first.flush()
        second.append({"n": 2})
        second.flush()
        assert [r for _, records in read_journal(store) for r in records] == [{"n": 1}, {"n": 2}]

    def test_threads_read_and_write_side_by_side(self, store: Store) -> None:
        failures: list[str] = []

        def work(i: int) -> None:
            value = b"%d" % i * 1000
            store.write(f"threads/{i}", value)
            for _ in range(3):
                if store.read(f"threads/{i}") != value:
                    failures.append(f"thread {i} read another's bytes")

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert failures == []
        assert len(store.list("threads")) == 6


def fail_half_way(store: Store, path: str, data: bytes) -> None:
    """Stream some bytes and then raise ZeroDivisionError."""
    with store.stream(path) as sink:
        sink.write(data)
        raise ZeroDivisionError
