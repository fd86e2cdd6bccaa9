"""Documents packed into windows: whole, each token once, and no neighbour is seen."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.data.packing import Packed, best_fit, targets

pytestmark = pytest.mark.ring0
PADDING = -7


def numbered_tokens(lengths: list[int]) -> list[np.ndarray]:
    """Documents in which every token is another number."""
    return np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(1, 16))
def test_every_token_is_in_one_window_beside_its_own_document(lengths: list[int], seq_len: int) -> None:
    documents = numbered_tokens(lengths)
    packed = Packed(documents, seq_len=seq_len, pad=PADDING)
    found: list[int] = []
    for i in range(len(packed)):
        window = packed[i]
        assert all(value.shape == (seq_len + 1,) for value in window.values())
        real = window["documents"] > 0
        assert (window["tokens"][~real] == PADDING).all()
        found += window["tokens"][real].tolist()
        for number in range(1, window["documents"].max() + 1):
            piece = window["tokens"][window["documents"] == number]
            assert (np.diff(piece) == 1).all(), "a piece is a run of one document"
            assert (window["positions"][window["documents"] == number] == np.arange(len(piece))).all()
    assert sorted(found) == list(range(sum(lengths)))
    pieces = sum(-(-n // (seq_len + 1)) for n in lengths)
    assert sum(packed[i]["documents"].max() for i in range(len(packed))) == pieces, "none is cut without need"


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_bins_are_never_over_full_and_few(sizes: list[int]) -> None:
    bins = best_fit(np.array(sizes), 20)
    filled = np.bincount(bins, weights=sizes)
    assert filled.max() <= 20
    assert (filled > 0).all()
    assert len(filled) <= 11 / 9 * -(-sum(sizes) // 20) + 6 / 9 + sum(size > 10 for size in sizes)


def test_no_target_crosses_into_another_document() -> None:
    packed = Packed([np.array([1, 2, 3]), np.array([4, 5])], seq_len=6, pad=0)
    window = packed[0]
    assert window["tokens"].tolist() == [1, 2, 3, 4, 5, 0, 0]
    assert targets(window["tokens"], window["documents"], ignore=-1).tolist() == [2, 3, -1, 5, -1, -1]


def test_a_pickle_numbers_its_windows_alike() -> None:
    packed = Packed(numbered_tokens([3, 9, 2, 14, 5, 5]), seq_len=8)
    again = pickle.loads(pickle.dumps(packed))
    for i in range(len(packed)):
        assert all((again[i][key] == packed[i][key]).all() for key in packed[i])
