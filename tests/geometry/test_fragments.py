"""Fragments as a table."""

from __future__ import annotations

import numpy as np
import pytest

from elastic_train.geometry.box import Box
from elastic_train.geometry.fragments import Fragments

pytestmark = pytest.mark.ring0

ROWS = (
    ("w", "param", "float32", (4, 6), Box((2, 0), (2, 6))),
    ("w", "exp_avg", "float32", (4, 6), Box((0, 0), (4, 6))),
    ("scale", "param", "bfloat16", (), Box((), ())),
    ("w", "param", "float32", (4, 6), Box((0, 0), (2, 6))),
    ("b", "param", "float64", (7,), Box((7,), (0,))),
)


def test_a_table_gives_back_the_boxes_it_was_made_of():
    table = Fragments.of(ROWS)
    assert len(table) == len(ROWS)
    for i, (tensor, state, dtype, shape, box) in enumerate(ROWS):
        key = table.key[i]
        assert (table.names[key], table.dtypes[key], table.shapes[key]) == ((tensor, state), dtype, shape)
        assert table.box(i) == box


def test_bytes_are_elements_times_the_size_of_the_dtype():
    assert Fragments.of(ROWS).nbytes.tolist() == [48, 96, 2, 48, 0]


def test_tables_of_different_names_and_dims_join_into_one():
    first, second, third = Fragments.of(ROWS[:2]), Fragments.of(ROWS[2:]), Fragments.of([])
    joined = Fragments.concat([third, first, second, first])
    assert [joined.box(i) for i in range(len(joined))] == [r[4] for r in (*ROWS, *ROWS[:2])]
    assert joined.names == Fragments.of(ROWS).names
    assert len(Fragments.concat([])) == 0


def test_chosen_rows_keep_their_names():
    table = Fragments.of(ROWS)
    chosen = table.take(np.array([3, 0]))
    assert [chosen.box(0), chosen.box(1)] == [ROWS[3][4], ROWS[0][4]]
    assert table.take(table.numel > 0).nbytes.tolist() == [48, 96, 2, 48]


def test_one_name_with_two_shapes_is_refused():
    with pytest.raises(AssertionError, match="two dtypes or shapes"):
        Fragments.of([ROWS[0], ("w", "param", "float32", (5, 6), Box((0, 0), (5, 6)))])
    other = Fragments.of([("w", "param", "float16", (4, 6), Box((0, 0), (4, 6)))])
    with pytest.raises(AssertionError, match="in one table, not in another"):
        Fragments.concat([Fragments.of(ROWS), other])
