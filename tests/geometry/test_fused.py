"""Fused tensors cut part by part."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.geometry.box import Box
from elastic_train.geometry.fused import fused_runs, logical_boxes

pytestmark = pytest.mark.ring0


@settings(deadline=None, derandomize=True, max_examples=80)
@given(parts=st.lists(st.integers(0, 3), min_size=1, max_size=4), ranks=st.integers(1, 4), data=st.data())
def test_each_rank_has_its_share_of_every_part_and_every_row_is_somewhere_once(
    parts: list[int], ranks: int, data: st.DataObject
) -> None:
    sizes = [ranks * part for part in parts]
    rows = sum(sizes)
    runs = fused_runs(sizes, ranks)
    order = np.concatenate([np.arange(r.logical, r.logical + r.length) for r in runs])
    assert sorted(order) == list(range(rows))
    starts = np.cumsum([0, *sizes])
    own = order.reshape(ranks, -1)
    for rank in range(ranks):
        for part, size in enumerate(sizes):
            share = size // ranks
            first = starts[part] + rank * share
            inside = (own[rank] >= starts[part]) & (own[rank] < starts[part + 1])
            assert list(own[rank][inside]) == list(range(first, first + share))
    low = data.draw(st.integers(0, rows))
    high = data.draw(st.integers(low, rows))
    found = [
        (box.offsets[0] + i, low + row + i)
        for box, row in logical_boxes(Box((low, 0), (high - low, 5)), runs)
        for i in range(box.sizes[0])
    ]
    assert found == [(order[at], at) for at in range(low, high)]
