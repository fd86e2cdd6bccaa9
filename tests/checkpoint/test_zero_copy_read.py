"""Bytes go from a file straight into the arrays that want them, and are verified all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.ranges import RangeIndex
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.writer import write_part
from elastic_train.checkpoint.zero_copy_read import targets
from elastic_train.errors import ChecksumMismatch
from elastic_train.geometry.box import Box
from elastic_train.storage.fsspec_store import open_store

pytestmark = pytest.mark.ring1

ROWS, COLUMNS = 1000, 100  # 400,000 bytes: seven pages of 64 KiB


@pytest.fixture
def kept(tmp_path: Path, cut: Callable[..., Piece]) -> tuple[Checkpoint, np.ndarray, Path]:
    """One fragment of many pages in a file."""
    array = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), dtype=np.float32)
    store = open_store(str(tmp_path))
    assemble(store, "c", [write_part(store, "c", 0, [cut("w", array)])], {"step": 1})
    return Checkpoint.open(store, "c"), array, tmp_path / "c" / "w00000.safetensors"


@pytest.mark.parametrize(
    ("box", "straight"),
    [
        (Box.whole((ROWS, COLUMNS)), True),
        (Box((333, 0), (401, COLUMNS)), True),  # begins and ends inside a page
        (Box((333, 7), (1, 50)), True),  # a part of one row
        (Box((333, 7), (2, 50)), False),  # two parts of rows aren't one range
    ],
)
def test_a_range_of_bytes_needs_no_copy(
    kept: tuple[Checkpoint, np.ndarray, Path], box: Box, straight: bool
) -> None:
    checkpoint, array, _ = kept
    output = np.zeros(box.sizes, np.float32)
    request = ("w", "param", box)
    (read,) = RangeIndex(checkpoint.manifest, url="").reads([request])
    assert (targets(read, [request], [output]) is not None) == straight
    checkpoint.read_many([request], into=[output])
    np.testing.assert_array_equal(output, array[box.slices])


def test_an_array_with_strides_of_its_own_is_filled_by_copying(
    kept: tuple[Checkpoint, np.ndarray, Path],
) -> None:
    checkpoint, array, _ = kept
    wide = np.zeros((ROWS, COLUMNS * 2), np.float32)
    checkpoint.read_many([("w", "param", Box.whole((ROWS, COLUMNS)))], into=[wide[:, ::2]])
    np.testing.assert_array_equal(wide[:, ::2], array)


@pytest.mark.parametrize("row", [333, 330])  # the first row that is wanted; one before it on its page
def test_a_page_is_verified_whole_also_where_only_a_part_of_it_is_kept(
    kept: tuple[Checkpoint, np.ndarray, Path], row: int
) -> None:
    checkpoint, array, file = kept
    (found,) = checkpoint.manifest.rows([0])
    data = bytearray(file.read_bytes())
    data[found.byte_offset + row * COLUMNS * 4] ^= 1
    file.write_bytes(data)
    with pytest.raises(ChecksumMismatch, match=r"page 2 of w \(param\)"):
        checkpoint.read("w", "param", Box((333, 0), (401, COLUMNS)))
    np.testing.assert_array_equal(checkpoint.read("w", "param", Box((500, 0), (10, COLUMNS))), array[500:510])
