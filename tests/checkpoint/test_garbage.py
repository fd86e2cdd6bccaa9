"""Deleting, under a store that fails at every single call in turn: no file that somebody needs ever goes."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.references import References
from elastic_train.checkpoint.run_directory import Pruned, RunDirectory, attempt_path
from elastic_train.checkpoint.verify import verify
from elastic_train.checkpoint.writer import WrittenPart, write_part
from elastic_train.errors import Fenced, NoCheckpoint, StorageError
from elastic_train.recovery.evidence import Stored
from elastic_train.storage.fsspec_store import open_store
from elastic_train.testing.faulty_store import Absent, Blind, FailAt, Fault, FaultyStore

pytestmark = pytest.mark.ring1

Cut = Callable[..., Piece]
BASE = np.arange(20_000, dtype=np.float32).reshape(20, -1)
IN_FLIGHT = ((1, 5),)


class AdaptersRun:
    """Frozen `base`, trained `low`: three commits of which the later refer to the first, an attempt in flight
    that refers to it too, an orphan, and what a killed writer left in the log.
    """

    def __init__(self, root: Path, cut: Cut) -> None:
        self.root, self._cut = root, cut
        self.run = RunDirectory(open_store(str(root)))
        self.term = self.run.begin_term("a")
        self.references = References(self.run, full_every=100)
        self.stored = [self.commit(step, self.parts(step)) for step in (1, 2, 3)]
        self.flying = self.parts(5)
        self.parts(2, generation=9)
        (root / "commits" / ".tmp-0123456789abcdef").write_bytes(b"half of a rec")

    def parts(self, step: int, generation: int = 1) -> list[WrittenPart]:
        low = np.full((4, 8), step, dtype=np.float32)
        pieces = [self._cut("base", BASE), self._cut("low", low)]
        directory = attempt_path(step=step, generation=generation)
        return [
            write_part(self.run.store, directory, 0, pieces, unchanged=self.references.unchanged({"base"}))
        ]

    def commit(self, step: int, parts: list[WrittenPart]) -> Stored:
        assembled = assemble(self.run.store, attempt_path(step=step, generation=1), parts, {"step": step})
        return self.run.commit(assembled, term=self.term, generation=1, step=step, lineage=[(1, 0)])

    def again(self, root: Path, *faults: Fault) -> tuple[RunDirectory, FaultyStore]:
        """The same run in a directory of its own, on a store that fails."""
        shutil.copytree(self.root, root)
        store = FaultyStore(open_store(str(root)), faults)
        return RunDirectory(store), store

    def prune(self, run: RunDirectory) -> Pruned:
        return run.prune([self.stored[2].slot], IN_FLIGHT, term=self.term)

    def check(self, root: Path) -> None:
        """What is kept is whole, and what is in flight can still be committed."""
        run = RunDirectory(open_store(str(root)))
        for stored in run.commits():
            assert verify(Checkpoint.of(run, stored)).problems == ()
        directory = attempt_path(step=5, generation=1)
        assembled = assemble(run.store, directory, self.flying, {"step": 5})
        last = run.commit(assembled, term=self.term, generation=1, step=5, lineage=[(1, 0)])
        assert verify(Checkpoint.of(run, last)).problems == ()


@pytest.fixture
def adapters(tmp_path: Path, cut: Cut) -> AdaptersRun:
    return AdaptersRun(tmp_path / "run", cut)


def test_what_nobody_needs_goes_and_the_rest_stays(adapters: AdaptersRun) -> None:
    pruned = adapters.prune(adapters.run)
    first, second, third = (s.path for s in adapters.stored)
    assert pruned.slots == tuple(s.slot for s in adapters.stored[:2])
    assert set(pruned.directories) == {first, second, attempt_path(step=2, generation=9)}
    left = {p.split("/")[1] for p in adapters.run.store.list("checkpoints")}
    assert left == {p.split("/")[1] for p in (first, third, attempt_path(step=5, generation=1))}
    assert adapters.run.store.list(first) == [f"{first}/w00000-stable.safetensors"]
    assert adapters.run.store.unfinished() == []
    adapters.check(adapters.root)


def test_whatever_call_fails_nothing_needed_goes_and_the_next_prune_finishes(
    adapters: AdaptersRun, tmp_path: Path
) -> None:
    call, refused = 0, 0
    while True:
        call += 1
        root = tmp_path / f"failing-{call}"
        run, store = adapters.again(root, FailAt(call=call))
        before = {p.relative_to(root) for p in root.rglob("*") if p.is_file()}
        try:
            adapters.prune(run)
        except StorageError as error:
            refused += 1
            if "nothing was deleted" in str(error):
                assert before <= {p.relative_to(root) for p in root.rglob("*") if p.is_file()}
        if store.total < call:
            break
        again = RunDirectory(open_store(str(root)))
        adapters.prune(again)
        assert again.store.unfinished() == []
        assert not (root / adapters.stored[1].path).exists()
        adapters.check(root)
        shutil.rmtree(root)
    assert refused == call - 1 > 20


def test_a_listing_that_finds_nothing_deletes_nothing_needed(adapters: AdaptersRun, tmp_path: Path) -> None:
    for call in range(1, 40):
        root = tmp_path / f"blind-{call}"
        run, store = adapters.again(root, Blind(call=call))
        adapters.prune(run)
        adapters.check(root)
        shutil.rmtree(root)
        if store.calls["list"] < call:
            return
    raise AssertionError("a prune lists more often than this test tries")


def test_a_read_that_finds_nothing_once_deletes_nothing_needed(adapters: AdaptersRun, tmp_path: Path) -> None:
    """A slot of the log that is missed hides a commit from the first look, and not from the second."""
    for call in range(1, 60):
        root = tmp_path / f"absent-{call}"
        run, store = adapters.again(root, Absent(call=call))
        with suppress(StorageError, NoCheckpoint):
            adapters.prune(run)
        adapters.check(root)
        shutil.rmtree(root)
        if store.calls["read"] < call:
            return
    raise AssertionError("a prune reads more often than this test tries")


def test_a_directory_that_cannot_be_listed_is_not_thought_empty(
    adapters: AdaptersRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = os.scandir

    def failing(path: str) -> object:
        if str(path).endswith("step-0000000003.g1"):
            raise OSError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", failing)
    with suppress(StorageError):  # a store says so, or finds nothing
        adapters.prune(adapters.run)
    monkeypatch.undo()
    adapters.check(adapters.root)


def test_links_that_lead_nowhere_stop_no_prune_and_are_not_followed(
    adapters: AdaptersRun, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    for directory in (adapters.root, adapters.root / "checkpoints", adapters.root / adapters.stored[1].path):
        (directory / "loop").symlink_to("loop")
        (directory / "gone").symlink_to("nowhere")
        (directory / "out").symlink_to(outside)
        (directory / "up").symlink_to("..")
    adapters.prune(adapters.run)
    assert not (adapters.root / adapters.stored[1].path).exists()
    assert (outside / "precious").read_bytes() == b"x"
    adapters.check(adapters.root)


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_without_the_manifest_of_a_kept_checkpoint_nothing_goes(adapters: AdaptersRun, damage: str) -> None:
    path = adapters.root / adapters.stored[2].path / "manifest.parquet"
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    before = sorted(adapters.root.rglob("*"))
    with pytest.raises(StorageError, match=r"delete old checkpoints of .*nothing was deleted: .*0000000003"):
        adapters.prune(adapters.run)
    assert set(before) <= set(adapters.root.rglob("*"))


def test_a_controller_that_is_fenced_while_it_deletes_stops(adapters: AdaptersRun, tmp_path: Path) -> None:
    run, store = adapters.again(tmp_path / "fenced")
    other = RunDirectory(open_store(str(tmp_path / "fenced")))
    tree = store.delete_tree

    def once(prefix: str) -> None:
        other.begin_term("b")
        tree(prefix)

    store.delete_tree = once  # type: ignore[method-assign]
    with pytest.raises(Fenced):
        adapters.prune(run)
