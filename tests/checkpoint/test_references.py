"""Frozen tensors are written once; later checkpoints refer to them, and deletions know that."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.references import References
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.verify import verify
from elastic_train.checkpoint.writer import WrittenPart, write_part
from elastic_train.errors import FragmentMissing
from elastic_train.geometry.box import Box
from elastic_train.recovery.evidence import Stored
from elastic_train.storage.memory_store import MemoryStore

pytestmark = pytest.mark.ring1

Cut = Callable[..., Piece]
BASE = np.arange(300_000, dtype=np.float32).reshape(300, -1)


class Saves:
    """An adapter's run: `base` is frozen, `low` is trained. Two writers."""

    def __init__(self, cut: Cut, *, full_every: int = 100) -> None:
        self.run = RunDirectory(MemoryStore())
        self.term = self.run.begin_term("a")
        self.references = References(self.run, full_every=full_every)
        self._cut = cut
        self.written: list[int] = []

    def parts(self, step: int, base: np.ndarray = BASE) -> list[WrittenPart]:
        directory = attempt_path(step=step, generation=1)
        unchanged = self.references.unchanged({"base"})
        low = np.full((4, 8), step, dtype=np.float32)
        half = Box((0, 0), (150, 1000)), Box((150, 0), (150, 1000))
        own = [[self._cut("base", base, box)] for box in half]
        own[0].append(self._cut("low", low))
        return [
            write_part(self.run.store, directory, i, pieces, unchanged=unchanged)
            for i, pieces in enumerate(own)
        ]

    def commit(self, step: int, parts: list[WrittenPart]) -> Stored:
        directory = attempt_path(step=step, generation=1)
        assembled = assemble(self.run.store, directory, parts, {"step": step})
        self.written.append(assembled.bytes)
        return self.run.commit(assembled, term=self.term, generation=1, step=step, lineage=[(1, 0)])

    def save(self, step: int, base: np.ndarray = BASE) -> Stored:
        return self.commit(step, self.parts(step, base))

    def check(self, stored: Stored, base: np.ndarray = BASE) -> None:
        checkpoint = Checkpoint.of(self.run, stored)
        assert verify(checkpoint).sound
        assert np.array_equal(checkpoint.read("base", "param"), base)
        assert np.all(checkpoint.read("low", "param") == stored.step)


@pytest.fixture
def saves(cut: Cut) -> Saves:
    return Saves(cut)


def test_what_is_frozen_is_written_once(saves: Saves) -> None:
    for step in (1, 2, 3):
        saves.check(saves.save(step))
    assert saves.written[0] > BASE.nbytes
    assert max(saves.written[1:]) < 0.05 * BASE.nbytes


def test_an_old_checkpoint_goes_and_its_frozen_files_stay(saves: Saves) -> None:
    stored = [saves.save(step) for step in (1, 2, 3)]
    saves.run.prune([stored[2].slot], term=saves.term)
    saves.check(stored[2])
    first = saves.run.store.list(stored[0].path)
    assert [f.rpartition("/")[2] for f in first] == ["w00000-stable.safetensors", "w00001-stable.safetensors"]
    assert saves.run.store.list(stored[1].path) == []


def test_frozen_bytes_that_changed_after_all_are_written(saves: Saves) -> None:
    saves.save(1)
    other = BASE.copy()
    other[200, 3] = -1
    saves.check(saves.save(2, other), other)
    assert 0.4 < saves.written[1] / BASE.nbytes < 0.6  # the half that the change is in


def test_every_nth_checkpoint_is_whole_and_then_the_oldest_files_go(cut: Cut) -> None:
    saves = Saves(cut, full_every=3)
    stored = [saves.save(step) for step in (1, 2, 3, 4)]
    assert [size > BASE.nbytes for size in saves.written] == [True, False, True, False]
    saves.run.prune([stored[3].slot], term=saves.term)
    saves.check(stored[3])
    assert saves.run.store.list(stored[0].path) == []


def test_a_save_keeps_what_it_refers_to_while_it_is_in_flight(saves: Saves, cut: Cut) -> None:
    first = saves.save(1)
    parts = saves.parts(3)
    whole = Saves(cut)  # another writer's references, which know nothing: step 2 is whole
    saves.references = whole.references
    second = saves.save(2)
    saves.run.prune([second.slot], [(1, 3)], term=saves.term)
    assert saves.run.store.list(first.path)
    saves.check(saves.commit(3, parts))


def test_a_reference_whose_file_was_deleted_is_never_committed(saves: Saves, cut: Cut) -> None:
    saves.save(1)
    parts = saves.parts(3)
    saves.references = Saves(cut).references
    second = saves.save(2)
    saves.run.store.delete(f for f in saves.run.store.list("checkpoints") if "0001.g1" in f)
    with pytest.raises(FragmentMissing, match=r"step-0000000001.g1/w00000-stable.safetensors"):
        saves.commit(3, parts)
    assert saves.run.newest() == second
