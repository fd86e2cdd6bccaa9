"""Verifying as columns: each damaged fragment of many is named, and no sound one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.checkpoint import verify_rows
from elastic_train.checkpoint.checksums import crc, page_bytes, pages
from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.crc_joining import of_fragments, page_sizes
from elastic_train.checkpoint.differences import differences
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.verify import MOST_REPORTED, verify
from elastic_train.checkpoint.writer import write_part
from elastic_train.errors import ConfigError
from elastic_train.geometry.box import Box
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.store import Store

pytestmark = pytest.mark.ring1

Cut = Callable[..., Piece]
COUNT = 20_000


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def saved(store: Store, cut: Cut, directory: str = "c", *, last: int = 0) -> Checkpoint:
    """Many small fragments, one of several pages, and an empty one, in two files."""
    small = np.arange(COUNT * 4, dtype=np.int32).reshape(COUNT, 4)
    small[-1, -1] += last
    large = np.arange(1 << 18, dtype=np.float64)
    pieces = [cut("small", small, Box((i, 0), (1, 4))) for i in range(COUNT)]
    rest = [cut("large", large), cut("empty", np.zeros((0, 3), np.float32))]
    parts = [write_part(store, directory, 0, pieces), write_part(store, directory, 1, rest)]
    assemble(store, directory, parts, {"step": 1})
    return Checkpoint.open(store, directory)


def flip(store: Store, path: str, bytes_: list[int]) -> None:
    data = bytearray(store.read(path))
    for at in bytes_:
        data[at] ^= 1
    store.write(path, data)


def test_each_damaged_fragment_of_many_is_named(store: Store, cut: Cut) -> None:
    checkpoint = saved(store, cut)
    seen: list[tuple[int, int]] = []
    report = verify(checkpoint, progress=lambda done, total: seen.append((done, total)))
    assert report.sound
    assert report.fragments == COUNT + 2
    assert seen == sorted(seen)
    assert seen[-1] == (report.bytes, report.bytes)
    rows = checkpoint.manifest.rows(range(len(checkpoint.manifest)))
    of_small = {row.box.offsets[0]: row for row in rows if row.tensor == "small"}
    (large,) = (row for row in rows if row.tensor == "large")
    flip(store, "c/w00000.safetensors", [of_small[i].byte_offset + 5 for i in (0, 7, 19_999)])
    flip(store, "c/w00001.safetensors", [large.byte_offset + (1 << 20)])
    problems = verify(checkpoint).problems
    assert len(problems) == 4
    for place in (r"small (param) [0:1,0:4]", "small (param) [7:8,0:4]", "small (param) [19999:20000,0:4]"):
        assert sum(place in problem for problem in problems) == 1
    assert sum("large (param)" in problem for problem in problems) == 1


@pytest.mark.parametrize("size", [8, (9 << 20) + 24, (64 << 20) + (4 << 20), (64 << 20) + (128 << 10) + 8])
def test_a_byte_anywhere_in_a_large_fragment_is_noticed(store: Store, cut: Cut, size: int) -> None:
    data = np.arange(size // 8, dtype=np.int64)
    assemble(store, "c", [write_part(store, "c", 0, [cut("large", data)])], {"step": 1})
    checkpoint = Checkpoint.open(store, "c")
    assert verify(checkpoint).sound
    (row,) = checkpoint.manifest.rows([0])
    for at in {0, size // 2, size - 1}:
        flip(store, "c/w00000.safetensors", [row.byte_offset + at])
        (problem,) = verify(checkpoint).problems
        assert "large (param)" in problem
        assert "aren't the ones written" in problem
        flip(store, "c/w00000.safetensors", [row.byte_offset + at])
    assert verify(checkpoint).sound


@given(st.lists(st.integers(1, 5 << 20), min_size=1, max_size=6), st.integers(0, 1 << 32))
@settings(max_examples=30, deadline=None)
def test_sums_of_pages_give_the_sum_of_their_fragment(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    fragments = [memoryview(rng.bytes(size)) for size in sizes]
    sums = [[crc(page) for page in pages(view)] for view in fragments]
    counts = np.array([len(of) for of in sums])
    assert page_sizes(np.array(sizes)).tolist() == [page_bytes(size) for size in sizes]
    found = of_fragments(
        np.array([one for of in sums for one in of], dtype=np.uint32),
        np.cumsum(counts) - counts,
        counts,
        np.array(sizes),
    )
    assert found.tolist() == [crc(view) for view in fragments]


def test_ranges_of_a_file_are_cut_anywhere_and_lose_no_row(
    store: Store, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = saved(store, cut)
    for size, rows in ((64, 3), (4096, 1 << 16), (1 << 16, 17)):
        monkeypatch.setattr(verify_rows, "RANGE", size)
        monkeypatch.setattr(verify_rows, "ROWS", rows)
        batches = list(verify_rows.RowColumns(checkpoint.manifest).batches())
        found = np.sort(np.concatenate([batch.rows for batch in batches]))
        boxes = checkpoint.manifest.fragments
        assert np.array_equal(found, np.flatnonzero(boxes.nbytes > 0))
        assert all(batch.length < 2 * size or len(batch.rows) == 1 for batch in batches)


def test_a_file_that_is_gone_is_told_for_as_many_fragments_as_one_can_read(store: Store, cut: Cut) -> None:
    checkpoint = saved(store, cut)
    store.delete(["c/w00000.safetensors"])
    problems = verify(checkpoint).problems
    assert len(problems) == MOST_REPORTED + 1
    assert problems[-1] == f"and {COUNT - MOST_REPORTED} more fragments are damaged or gone"


def test_fragments_with_equal_hashes_are_not_read_to_compare_them(store: Store, cut: Cut) -> None:
    one, other = saved(store, cut, "a"), saved(store, cut, "b", last=3)
    found = [str(d) for d in differences(one, other)]
    assert found == ["small (param): 1 elements differ, the first at [19999, 3]"]
    assert one.files.bytes_read < 2 * COUNT * 16
    again = saved(store, cut, "d")
    before = again.files.bytes_read
    assert list(differences(one, again)) == []
    assert again.files.bytes_read == before


def test_what_a_ledger_notes_is_not_read_again(store: Store, cut: Cut, tmp_path: Path) -> None:
    checkpoint, ledger = saved(store, cut), tmp_path / "ledger"
    assert verify(checkpoint, ledger=ledger).sound
    head, *noted = ledger.read_text().splitlines()
    rows = verify_rows.RowColumns(checkpoint.manifest)
    batches = list(rows.batches())
    assert sorted(noted, key=int) == [str(n) for n in range(len(batches))]
    ledger.write_text(f"{head}\n0\n1")  # interrupted while it noted the second
    begins = [(rows.file(batch), int(rows.at[batch.rows[0]])) for batch in batches[:2]]
    for file, at in begins:
        flip(store, f"c/{file}", [at])
    seen: list[tuple[int, int]] = []
    report = verify(checkpoint, ledger=ledger, progress=lambda done, total: seen.append((done, total)))
    assert len(report.problems) == 1, "the first was right when it was looked at"
    assert seen[-1] == (report.bytes, report.bytes)
    assert "1" not in ledger.read_text().splitlines(), "what is damaged is looked at again"
    flip(store, f"c/{begins[1][0]}", [begins[1][1]])
    assert verify(checkpoint, ledger=ledger).sound
    assert sorted(ledger.read_text().split()[-len(batches) :], key=int) == [
        str(n) for n in range(len(batches))
    ]


def test_a_ledger_of_something_else_is_refused_and_left_as_it_was(
    store: Store, cut: Cut, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    verify(saved(store, cut), ledger=ledger)
    for text in (ledger.read_text(), "my notes\n", "no end of line", "\xff"):
        ledger.write_text(text)
        with pytest.raises(ConfigError, match="another"):
            verify(saved(store, cut, "other", last=1), ledger=ledger)
        assert ledger.read_text() == text
    with pytest.raises(ConfigError, match="can't be written"):
        verify(saved(store, cut, "third"), ledger=tmp_path / "nowhere" / "ledger")
