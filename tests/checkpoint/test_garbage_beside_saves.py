"""Deleting while a save is on its way, at every single call of either: what is kept is always whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.references import References
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.verify import verify
from elastic_train.checkpoint.writer import WrittenPart, write_part
from elastic_train.errors import CheckpointError, Fenced, StorageError
from elastic_train.recovery.evidence import Stored
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.store import Store
from elastic_train.testing.faulty_store import FaultyStore

pytestmark = [pytest.mark.ring1, pytest.mark.matrix]

Cut = Callable[..., Piece]
BASE = np.arange(4_000, dtype=np.float32).reshape(20, -1)
STEP = 6


class Live:
    """A run of three commits, of which the later refer to the first, in a directory of its own."""

    def __init__(self, root: Path, cut: Cut) -> None:
        self.root, self._cut = root, cut
        self.plain = open_store(str(root))
        self.run = RunDirectory(self.plain)
        self.term = self.run.begin_term("a")
        self.references = References(self.run, full_every=100)
        for step in (1, 2, 3):
            self.commit(self.run, self.write(self.plain, step), step)

    def write(self, store: Store, step: int = STEP) -> list[WrittenPart]:
        """As two workers do it."""
        low = np.full((4, 8), step, dtype=np.float32)
        directory = attempt_path(step=step, generation=1)
        unchanged = self.references.unchanged({"base"})
        return [
            write_part(store, directory, 0, [self._cut("base", BASE)], unchanged=unchanged),
            write_part(store, directory, 1, [self._cut("low", low)], unchanged=unchanged),
        ]

    def commit(self, run: RunDirectory, parts: list[WrittenPart], step: int = STEP) -> Stored:
        """As the controller does it."""
        directory = attempt_path(step=step, generation=1)
        assembled = assemble(run.store, directory, parts, {"step": step})
        return run.commit(assembled, term=self.term, generation=1, step=step, lineage=[(1, 0)])

    def prune(self, store: Store, *, reported: bool) -> None:
        """As the controller does it: the newest alone is kept; of the save it knows what was `reported`."""
        run = RunDirectory(store)
        in_flight = ((1, STEP),) if reported else ()
        run.prune([run.commits()[-1].slot], in_flight, term=self.term, writing=1)

    def check(self) -> int:
        run = RunDirectory(open_store(str(self.root)))
        for stored in run.commits():
            assert verify(Checkpoint.of(run, stored)).problems == ()
        return len(run.commits())


@pytest.fixture
def lives(tmp_path: Path, cut: Cut) -> Callable[[], Live]:
    numbers = iter(range(10_000))

    def made() -> Live:
        if (old := tmp_path / "run").exists():
            shutil.rmtree(old)
        next(numbers)
        return Live(old, cut)

    return made


@pytest.mark.parametrize("reported", [False, True])
def test_a_prune_before_any_call_of_a_writer(lives: Callable[[], Live], reported: bool) -> None:
    call, sealed = 0, 0
    while True:
        call += 1
        live = lives()
        store = FaultyStore(live.plain, ())
        store.before(call, lambda live=live: live.prune(live.plain, reported=reported))
        parts = live.write(store)
        live.commit(live.run, parts)  # the controller prunes and commits in turn, never at once
        assert live.check() == (2 if store.total >= call else 4)
        sealed += 1
        if store.total < call:
            assert sealed == call > 4
            return


@pytest.mark.parametrize("reported", [False, True])
def test_a_writer_before_any_call_of_a_prune(lives: Callable[[], Live], reported: bool) -> None:
    call = 0
    while True:
        call += 1
        live = lives()
        store = FaultyStore(live.plain, ())
        written: list[list[WrittenPart]] = []
        store.before(call, lambda live=live, written=written: written.append(live.write(live.plain)))
        live.prune(store, reported=reported)
        live.check()
        if not written:
            assert call > 20
            return
        live.commit(live.run, written[0])
        assert live.check() == 2


def test_somebody_else_who_takes_the_run_over_to_delete_before_any_call_of_a_commit(
    lives: Callable[[], Live],
) -> None:
    call, refused = 0, 0
    while True:
        call += 1
        live = lives()
        parts = live.write(live.plain)
        store = FaultyStore(live.plain, ())

        def take_over(live: Live = live) -> None:
            run = RunDirectory(open_store(str(live.root)))
            run.prune([run.commits()[-1].slot], term=run.begin_term("gc"))

        store.before(call, take_over)
        try:
            live.commit(RunDirectory(store), parts)
        except (Fenced, CheckpointError, StorageError):
            refused += 1
        live.check()
        if store.total < call:
            assert refused == call - 1 > 5
            return
