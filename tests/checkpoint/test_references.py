"""Frozen tensors are written once; later checkpoints refer to them, and deletions know that."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.import_run import adopt
from elastic_train.checkpoint.language.specification import IDENTITY
from elastic_train.checkpoint.language.translated_view import as_ours
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.checkpoint.references import References
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.verify import verify
from elastic_train.checkpoint.writer import WrittenPart, write_part
from elastic_train.errors import CheckpointDeleted, ConfigError, FragmentMissing, OutsideOfCheckpoint
from elastic_train.geometry.box import Box
from elastic_train.recovery.evidence import Stored
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.memory_store import MemoryStore
from elastic_train.testing.faulty_store import FaultyStore

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


# -- another run that reads here --


def owner(root: Path, cut: Cut) -> Saves:
    saves = Saves(cut)
    saves.run = RunDirectory(open_store(str(root)))
    saves.term = saves.run.begin_term("a")
    saves.references = References(saves.run, full_every=100)
    return saves


def imported(source: str, run: str, *, copy: bool = False) -> Checkpoint:
    adopt(as_ours(open_checkpoint(source), IDENTITY), open_store(run), holder="h", copy=copy)
    return open_checkpoint(run)


def test_what_another_run_reads_in_place_stays_until_it_is_taken_back(tmp_path: Path, cut: Cut) -> None:
    saves = owner(tmp_path / "owner", cut)
    first = saves.save(1)
    second = saves.save(2)
    reader = imported(str(tmp_path / "owner"), str(tmp_path / "reader"))
    saves.references = References(saves.run, full_every=1)
    third = saves.save(3)
    pruned = saves.run.prune([third.slot], term=saves.term)
    assert pruned.slots == (first.slot, second.slot)
    assert [s.step for s in saves.run.commits()] == [3]
    assert verify(reader).sound
    assert np.array_equal(reader.read("base", "param"), BASE)  # which lies in the first one's directory
    further = imported(str(tmp_path / "reader"), str(tmp_path / "further"))
    assert saves.run.unpin(str(tmp_path / "reader")) == 1
    saves.run.prune([third.slot], term=saves.term)
    assert verify(further).sound
    assert saves.run.unpin(str(tmp_path / "further")) == 1
    saves.run.prune([third.slot], term=saves.term)
    assert saves.run.store.list(first.path) == saves.run.store.list(second.path) == []
    assert not verify(further).sound


def test_a_prune_that_came_first_refuses_the_pin(tmp_path: Path, cut: Cut) -> None:
    saves = owner(tmp_path / "owner", cut)
    saves.save(1)
    record = saves.run.log.valid()[0]
    opened = open_checkpoint(str(tmp_path / "owner"))
    saves.references = References(saves.run, full_every=1)
    second = saves.save(2)
    saves.run.prune([second.slot], term=saves.term)
    with pytest.raises(CheckpointDeleted):
        RunDirectory(saves.run.store).pin(record, "reader")
    assert saves.run.log.pins() == ()
    mapped = as_ours(opened, IDENTITY)
    with pytest.raises(ConfigError, match=r"no checkpoint that .*owner keeps names .*--copy"):
        adopt(mapped, open_store(str(tmp_path / "reader")), holder="h")


def test_a_pin_and_a_prune_at_once_never_lose_a_file(tmp_path: Path, cut: Cut) -> None:
    """The prune is held after each of its calls in turn while another run pins what it is about to delete."""
    saves = owner(tmp_path / "owner", cut)
    first, second = saves.save(1), saves.save(2)
    record = saves.run.log.valid()[0]
    refused = kept = 0
    for call in range(1, 60):
        root = tmp_path / f"run-{call}"
        shutil.copytree(tmp_path / "owner", root)
        other, store = RunDirectory(open_store(str(root))), FaultyStore(open_store(str(root)), [])
        pinned: list[bool] = []

        def pin(other: RunDirectory = other, pinned: list[bool] = pinned) -> None:
            try:
                other.pin(record, "reader")
                pinned.append(True)
            except CheckpointDeleted:
                pinned.append(False)

        store.before(call, pin)
        RunDirectory(store).prune([second.slot], term=saves.term)
        if not pinned:
            break
        kept, refused = kept + pinned[0], refused + (not pinned[0])
        if pinned[0]:
            assert len(open_store(str(root)).list(first.path)) == len(saves.run.store.list(first.path))
        shutil.rmtree(root)
    assert kept > 3
    assert refused > 3


def test_a_copy_pins_nothing(tmp_path: Path, cut: Cut) -> None:
    saves = owner(tmp_path / "owner", cut)
    saves.save(1)
    assert verify(imported(str(tmp_path / "owner"), str(tmp_path / "copy"), copy=True)).sound
    assert saves.run.log.pins() == ()


def test_an_index_of_files_elsewhere_is_believed_in_its_own_run_alone(tmp_path: Path, cut: Cut) -> None:
    saves = owner(tmp_path / "owner", cut)
    saves.save(1)
    imported(str(tmp_path / "owner"), str(tmp_path / "reader"))
    (tmp_path / "reader").rename(tmp_path / "moved")
    with pytest.raises(OutsideOfCheckpoint, match="--allow-root"):
        open_checkpoint(str(tmp_path / "moved")).read("low", "param")
    allowed = [str(tmp_path / "owner")]
    assert verify(open_checkpoint(str(tmp_path / "moved"), allow_roots=allowed)).sound
