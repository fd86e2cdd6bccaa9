"""The commit log: one writer per slot, one owner per term, and no way round the fence."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_train.errors import Fenced, FormatUnsupported, NoCheckpoint, StorageError
from elastic_train.storage import commit_index
from elastic_train.storage.commit_log import CommitLog, CommitRecord
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.memory_store import MemoryStore
from elastic_train.storage.store import Buffer, Store
from elastic_train.testing.azure_server import AzureServer
from elastic_train.testing.faulty_store import Fail, FaultyStore, Hold
from elastic_train.testing.gcs_server import GCSServer
from elastic_train.testing.s3_server import S3Server

pytestmark = pytest.mark.ring1


def commit(step: int, generation: int = 1) -> CommitRecord:
    path = f"checkpoints/step-{step:010d}.g{generation}"
    return CommitRecord(
        kind="commit",
        step=step,
        generation=generation,
        path=path,
        manifest_hash="ab",
        lineage=((1, 0),),
        metrics=(("loss", 0.5),),
    )


class LogContract:
    """What holds over any store."""

    def test_a_log_reads_back_what_was_appended_in_order(self, store: Store) -> None:
        log = CommitLog(store)
        term = log.begin_term("a")
        written = [log.append(commit(step), term) for step in (100, 20, 300)]
        assert term == 1
        assert CommitLog(store).valid() == log.valid() == tuple(written)
        assert [(r.slot, r.term, r.after, r.step) for r in written] == [
            (2, 1, 1, 100),
            (3, 1, 2, 20),
            (4, 1, 3, 300),
        ]
        assert store.list("commits") == [f"commits/{slot:08d}.json" for slot in (1, 2, 3, 4)]

    def test_a_zombie_whose_create_lands_after_the_fence_is_fenced(self, store: Store) -> None:
        zombie_log = CommitLog(store)
        old = zombie_log.begin_term("zombie")
        zombie_log.append(commit(1), old)
        reached, go = threading.Event(), threading.Event()
        paused = CommitLog(FaultyStore(store, [Hold(operation="create", call=1, reached=reached, go=go)]))
        raised: list[Fenced] = []

        def zombie() -> None:
            try:
                paused.append(commit(2), old)
            except Fenced as error:
                raised.append(error)

        thread = threading.Thread(target=zombie)
        thread.start()
        assert reached.wait(100)  # it read the log, saw no fence, and is stopped right before its create
        successor = CommitLog(store)
        new = successor.begin_term("successor")
        successor.append(commit(3), new)
        go.set()
        thread.join()
        assert [(e.term, e.by_term) for e in raised] == [(old, new)]
        assert [r.step for r in CommitLog(store).valid()] == [1, 3]
        with pytest.raises(Fenced):
            zombie_log.append(commit(4), old)
        with pytest.raises(Fenced):
            zombie_log.check(old)

    def test_racing_controllers_get_different_terms_and_all_but_the_last_are_fenced(
        self, store: Store
    ) -> None:
        terms: dict[int, CommitLog] = {}
        start = threading.Barrier(4)

        def race(i: int) -> None:
            log = CommitLog(store)
            start.wait()
            terms[log.begin_term(f"c{i}")] = log

        threads = [threading.Thread(target=race, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert sorted(terms) == [1, 2, 3, 4]
        for term in (1, 2, 3):
            with pytest.raises(Fenced):
                terms[term].append(commit(term), term)
        terms[4].append(commit(4), 4)
        assert [r.step for r in CommitLog(store).valid()] == [4]


class TestLogInMemory(LogContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


class TestLogInFiles(LogContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(str(tmp_path / "run"))


class TestLogOnS3(LogContract):
    @pytest.fixture
    def store(self, s3: S3Server, tmp_path: Path) -> Store:
        return open_store(f"{s3.bucket('log')}/{tmp_path.name}", options=s3.options)


class TestLogOnGCS(LogContract):
    @pytest.fixture
    def store(self, gcs: GCSServer, tmp_path: Path) -> Store:
        return open_store(f"{gcs.bucket('log')}/{tmp_path.name}", options=gcs.options)


class TestLogOnAzure(LogContract):
    @pytest.fixture
    def store(self, azure: AzureServer, tmp_path: Path) -> Store:
        return open_store(f"{azure.container('log')}/{tmp_path.name}", options=azure.options)


def test_a_record_of_an_older_term_behind_a_fence_is_void() -> None:
    """However it got there: the reader's rule doesn't depend on the writer's care."""
    store = MemoryStore()
    log = CommitLog(store)
    old = log.begin_term("a")
    log.append(commit(1), old)
    CommitLog(store).begin_term("b")
    careless = CommitLog(store)
    careless.records()
    careless._known.term = old
    assert careless._claim(commit(2), old)
    assert [r.step for r in CommitLog(store).valid()] == [1]


def test_a_pruned_commit_is_no_longer_valid() -> None:
    store = MemoryStore()
    log = CommitLog(store)
    term = log.begin_term("a")
    slots = [log.append(commit(step), term).slot for step in (1, 2, 3)]
    log.append(CommitRecord(kind="prune", removes=(slots[0], slots[2])), term)
    assert [r.step for r in CommitLog(store).valid()] == [2]


class LostAnswer(MemoryStore):
    """Creates, and then says that the name was taken: what a retry sees after a lost answer."""

    def create(self, path: str, data: Buffer) -> None:
        super().create(path, data)
        super().create(path, data)


def test_a_create_whose_answer_was_lost_counts_once() -> None:
    store = LostAnswer()
    log = CommitLog(store)
    term = log.begin_term("a")
    log.append(commit(1), term)
    log.append(commit(2), term)
    assert term == 1
    assert [(r.slot, r.step) for r in CommitLog(store).valid()] == [(2, 1), (3, 2)]


def test_a_failed_append_can_be_repeated() -> None:
    store = MemoryStore()
    log = CommitLog(FaultyStore(store, [Fail(operation="create", call=2)]))
    term = log.begin_term("a")
    with pytest.raises(StorageError):
        log.append(commit(1), term)
    log.append(commit(1), term)
    assert [r.step for r in CommitLog(store).valid()] == [1]


def test_new_records_cost_one_read_each_and_no_listing() -> None:
    store = MemoryStore()
    writer = CommitLog(store)
    term = writer.begin_term("a")
    for step in range(50):
        writer.append(commit(step), term)
    counting = FaultyStore(store, ())
    reader = CommitLog(counting)
    reader.valid()
    assert counting.calls == {"list": 2, "read": 52}  # 51 slots and the one that isn't there
    writer.append(commit(50), term)
    assert len(reader.valid()) == 51
    assert counting.calls == {"list": 2, "read": 54}


@pytest.mark.parametrize("damage", ["gap", "text", "changed", "out"])
def test_a_damaged_log_is_refused_with_a_remedy(damage: str) -> None:
    store = MemoryStore()
    log = CommitLog(store)
    term = log.begin_term("a")
    for step in (1, 2):
        log.append(commit(step), term)
    second = store.read("commits/00000002.json")
    match damage:
        case "gap":
            store.delete(["commits/00000002.json"])
        case "text":
            store.write("commits/00000002.json", second[:-5])
        case "changed":
            store.write("commits/00000002.json", second.replace(b'"step":1', b'"step":9'))
        case _:
            store.write("commits/00000002.json", second.replace(b'"path":"', b'"path":"../'))
    with pytest.raises(NoCheckpoint, match="Restore the directory `commits`"):
        CommitLog(store).valid()


def test_a_record_of_a_newer_format_asks_for_a_newer_release() -> None:
    store = MemoryStore()
    CommitLog(store).begin_term("a")
    first = store.read("commits/00000001.json")
    store.write("commits/00000001.json", first.replace(b"commit/1", b"commit/2"))
    with pytest.raises(FormatUnsupported, match="Upgrade"):
        CommitLog(store).valid()


def lived(store: Store, *, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three terms of commits and prunes, a pin that stays, one that is taken back, and a late zombie."""
    monkeypatch.setattr(commit_index, "EVERY", every)
    for number in range(3):
        log = CommitLog(store)
        term = log.begin_term(f"c{number}")
        pin = replace(commit(1), kind="pin", holder=f"reader {number}")
        pins = [log.append(pin, term).slot for _ in range(2)]
        slots = [log.append(commit(100 * number + step, number + 1), term).slot for step in range(1, 8)]
        log.append(CommitRecord(kind="prune", removes=(*slots[:-2], pins[0])), term)
        zombie = CommitLog(store)
        zombie.records()
        zombie._known.term = 0
        zombie._claim(commit(999), 0)


@pytest.mark.parametrize("every", [1, 2, 5, 7, 11])
def test_an_index_and_the_rest_tell_the_same_as_all_slots(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    lived(store, every=every, monkeypatch=monkeypatch)
    assert len(store.list("commits-index")) == 2
    short = CommitLog(store)
    said = (short.valid(), short.pins(), short.newest_term())
    store.delete_tree("commits-index")
    whole = CommitLog(store)
    assert said == (whole.valid(), whole.pins(), whole.newest_term())
    assert [r.step for r in whole.valid()] == [6, 7, 106, 107, 206, 207]
    assert short.begin_term("next") == 4
    assert whole.begin_term("after that") == 5


def test_a_log_with_an_index_is_read_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    monkeypatch.setattr(commit_index, "EVERY", 50)
    log = CommitLog(store)
    term = log.begin_term("a")
    before = log.append(commit(1), term)
    for step in range(2, 500):
        now = log.append(commit(step), term)
        log.append(CommitRecord(kind="prune", removes=(before.slot,)), term)
        before = now
    counting = FaultyStore(store, ())
    reader = CommitLog(counting)
    assert [r.step for r in reader.valid()] == [499]
    assert counting.calls["list"] == 1
    assert counting.calls["read"] < 120


@pytest.mark.parametrize("damage", ["text", "another", "newer"])
def test_an_index_that_does_not_fit_is_passed_over(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    lived(store, every=10, monkeypatch=monkeypatch)
    kept = CommitLog(store).valid()
    for path in store.list("commits-index"):
        data = store.read(path)
        match damage:
            case "text":
                store.write(path, data[:-9])
            case "another":
                store.write(path, data.replace(b'"hash":"', b'"hash":"0'))
            case _:
                store.write(path, data.replace(b"commit_index/1", b"commit_index/2"))
    assert CommitLog(store).valid() == kept


def test_nothing_is_appended_to_a_log_that_is_gone_and_all_goes_on_when_it_is_back(tmp_path: Path) -> None:
    """Also where its directory was made again meanwhile, by whoever writes something else there."""
    store = open_store(str(tmp_path / "run"))
    log = CommitLog(store)
    term = log.begin_term("a")
    (tmp_path / "run/commits").rename(tmp_path / "away")
    with pytest.raises(StorageError, match=r"00000001\.json.* is gone"):
        log.append(CommitRecord(kind="commit", path="x"), term)
    (tmp_path / "away").rename(tmp_path / "run/commits")
    log.append(CommitRecord(kind="commit", path="x"), term)
    assert [r.path for r in CommitLog(store).valid()] == ["x"]
