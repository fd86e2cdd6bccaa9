"""A commit that is ordered again, by a successor or after an error, changes nothing that may be visible."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from elastic_train.checkpoint.commit import MANIFEST, STATE, assemble
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.verify import verify
from elastic_train.checkpoint.writer import WrittenPart, write_part
from elastic_train.errors import ChecksumMismatch, StorageError
from elastic_train.storage.memory_store import MemoryStore
from elastic_train.storage.store import Store
from elastic_train.testing.faulty_store import Fail, FaultyStore

pytestmark = pytest.mark.ring1
DIRECTORY = attempt_path(step=2, generation=1)
FIRST, LATER = {"loss": 1.0}, {"loss": 1.0, "accuracy": 0.5}


def parts(store: Store, cut: Callable[..., Piece], value: float = 2.0) -> list[WrittenPart]:
    return [write_part(store, DIRECTORY, 0, [cut("w", np.full((4, 4), value, dtype=np.float32))])]


def document(metrics: dict[str, float], digest: int = 7) -> dict[str, object]:
    return {"step": 2, "state_digest": digest, "metrics": metrics}


def test_a_commit_with_later_metrics_leaves_the_committed_one_as_it_is(cut: Callable[..., Piece]) -> None:
    store = MemoryStore()
    run = RunDirectory(store)
    term = run.begin_term("first")
    written = parts(store, cut)
    assembled = assemble(store, DIRECTORY, written, document(FIRST))
    stored = run.commit(assembled, term=term, generation=1, step=2, lineage=((1, 0),))
    before = {path: store.read(path) for path in store.list("checkpoints")}

    successor = RunDirectory(store)
    term = successor.begin_term("second")
    again = assemble(store, DIRECTORY, written, document(LATER))
    assert again == assembled
    assert {path: store.read(path) for path in store.list("checkpoints")} == before
    assert successor.commit(again, term=term, generation=1, step=2, lineage=((1, 0),)) == stored
    assert len(successor.commits()) == 1
    opened = Checkpoint.newest(successor)
    assert opened.document["metrics"] == FIRST
    assert verify(opened).problems == ()


@pytest.mark.parametrize("call", [1, 2])
def test_an_assembly_that_broke_off_is_completed_by_the_next(call: int, cut: Callable[..., Piece]) -> None:
    store = MemoryStore()
    run = RunDirectory(store)
    term = run.begin_term("a")
    written = parts(store, cut)
    with pytest.raises(StorageError):
        assemble(
            FaultyStore(store, [Fail(operation="create", call=call)]), DIRECTORY, written, document(FIRST)
        )
    assert not store.exists(f"{DIRECTORY}/{MANIFEST}")
    assembled = assemble(store, DIRECTORY, written, document(LATER))
    run.commit(assembled, term=term, generation=1, step=2, lineage=((1, 0),))
    opened = Checkpoint.newest(run)
    assert opened.document["metrics"] == (LATER if call == 1 else FIRST)
    assert verify(opened).problems == ()


class Turns(MemoryStore):
    """Between two creates of one caller there comes another's whole assembly."""

    def __init__(self) -> None:
        super().__init__()
        self.between: Callable[[], object] = lambda: None

    def create(self, path: str, data: bytes | bytearray | memoryview) -> None:
        super().create(path, data)
        between, self.between = self.between, lambda: None
        between()


def test_two_controllers_that_assemble_at_once_make_one_checkpoint(cut: Callable[..., Piece]) -> None:
    store = Turns()
    written = parts(store, cut)
    other: list[object] = []
    store.between = lambda: other.append(assemble(store, DIRECTORY, written, document(LATER)))
    mine = assemble(store, DIRECTORY, written, document(FIRST))
    assert other == [mine]
    assert b"accuracy" not in store.read(f"{DIRECTORY}/{STATE}")


def test_another_state_under_the_name_of_an_attempt_is_refused(cut: Callable[..., Piece]) -> None:
    store = MemoryStore()
    written = parts(store, cut)
    assemble(store, DIRECTORY, written, document(FIRST))
    before = [(path, store.read(path)) for path in (f"{DIRECTORY}/{STATE}", f"{DIRECTORY}/{MANIFEST}")]
    with pytest.raises(ChecksumMismatch, match="assembled before, from other parts"):
        assemble(store, DIRECTORY, written, document(FIRST, digest=8))
    other = parts(store, cut, value=3.0)
    with pytest.raises(ChecksumMismatch, match="assembled before, from other parts"):
        assemble(store, DIRECTORY, other, document(FIRST))
    assert [(path, store.read(path)) for path, _ in before] == before


def test_repeated_any_number_of_times_it_is_one_commit(cut: Callable[..., Piece]) -> None:
    store = MemoryStore()
    run = RunDirectory(store)
    run.begin_term("first")
    written = parts(store, cut)
    seen = set[object]()
    for metrics, _ in itertools.product((FIRST, LATER), range(3)):
        term = run.begin_term("again")
        assembled = assemble(store, DIRECTORY, written, document(metrics))
        seen.add((assembled, run.commit(assembled, term=term, generation=1, step=2, lineage=((1, 0),))))
    assert len(seen) == 1
