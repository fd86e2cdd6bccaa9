"""Operations: each does to elements what it says, and its inverse undoes it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.checkpoint.language.cuts import Cuts, Equal, Heads, Sizes
from elastic_train.checkpoint.language.operations import (
    Cast,
    Fuse,
    Operation,
    Resize,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from elastic_train.checkpoint.language.virtual import Virtual, simplify, source

pytestmark = pytest.mark.ring0

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


def _source(shape: tuple[int, ...], name: str = "w") -> Virtual:
    return source(shape, "float32", name, "param")


@st.composite
def _cuts(draw: st.DrawFn) -> tuple[Cuts, int]:
    """A way to cut and a length that it fits."""
    match draw(st.integers(0, 2)):
        case 0:
            parts = draw(st.integers(1, 4))
            return Equal(parts), parts * draw(st.integers(1, 4))
        case 1:
            sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
            return Sizes(sizes), sum(sizes)
        case _:
            kv, share, size = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
            return Heads(kv * share, kv, draw(st.booleans())), kv * (share + 2) * size


@st.composite
def _steps(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Operation]]:
    """A shape and operations that keep one tensor and can be undone."""
    start = shape = draw(SHAPES)
    made: list[Operation] = []
    for _ in range(draw(st.integers(0, 4))):
        match draw(st.integers(0, 2)):
            case 0:
                order = tuple(draw(st.permutations(range(len(shape)))))
                made.append(Transpose(order=order))
                shape = tuple(shape[d] for d in order)
            case 1:
                dim = draw(st.integers(0, len(shape) - 1))
                more = shape[dim] + draw(st.integers(0, 3))
                made.append(Resize(dim=dim, before=shape[dim], after=more))
                shape = (*shape[:dim], more, *shape[dim + 1 :])
            case _:
                dim = draw(st.integers(0, len(shape)))
                made.append(Stack(dim=dim))
                shape = (*shape[:dim], 1, *shape[dim:])
    return start, made


@settings(max_examples=40)
@given(_cuts(), st.integers(0, 2), st.integers(1, 3))
def test_fuse_undoes_split(cut: tuple[Cuts, int], dim: int, other: int) -> None:
    cuts, length = cut
    shape = [other] * 3
    shape[dim] = length
    whole = _source(tuple(shape))
    split = Split(dim=dim, cuts=cuts)
    parts = split.apply([whole])
    assert split.inverse().apply(parts) == [whole]


@settings(max_examples=40)
@given(_cuts())
def test_split_undoes_fuse(cut: tuple[Cuts, int]) -> None:
    cuts, length = cut
    sizes = [sum(size for _, size in intervals) for intervals in cuts.intervals(length)]
    parts = [_source((2, size), f"p{i}") for i, size in enumerate(sizes)]
    fuse = Fuse(dim=1, cuts=cuts)
    back = fuse.inverse()
    assert not isinstance(back, str)
    assert [simplify(t) for t in back.apply(fuse.apply(parts))] == parts


@settings(max_examples=40)
@given(SHAPES, st.integers(0, 3), st.integers(1, 5))
def test_unstack_undoes_stack(shape: tuple[int, ...], dim: int, count: int) -> None:
    dim = min(dim, len(shape))
    parts = [_source(shape, f"p{i}") for i in range(count)]
    assert Stack(dim=dim).inverse().apply(Stack(dim=dim).apply(parts)) == parts


@settings(max_examples=40)
@given(SHAPES, st.integers(0, 2))
def test_stack_undoes_unstack(shape: tuple[int, ...], dim: int) -> None:
    whole = _source(shape)
    dim = min(dim, len(shape) - 1)
    assert Stack(dim=dim).apply(Unstack(dim=dim).apply([whole])) == [whole]


@settings(max_examples=60)
@given(_steps())
def test_any_sequence_is_undone_backwards(steps: tuple[tuple[int, ...], list[Operation]]) -> None:
    shape, operations = steps
    whole = [_source(shape)]
    made = whole
    for operation in operations:
        made = operation.apply(made)
    for operation in reversed(operations):
        back = operation.inverse()
        assert not isinstance(back, str)
        made = back.apply(made)
    assert [simplify(t) for t in made] == whole


def test_grouped_heads_are_each_group_in_turn() -> None:
    q, k, v = Heads(4, 2, grouped=True).intervals(16)
    assert (q, k, v) == (((0, 4), (8, 4)), ((4, 2), (12, 2)), ((6, 2), (14, 2)))


@pytest.mark.parametrize(
    ("operation", "shapes", "problem"),
    [
        (Split(dim=0, cuts=Equal(2)), [(3,)], "3 elements aren't 2 equal parts"),
        (Split(dim=0, cuts=Sizes((1, 1))), [(3,)], r"sizes \[1, 1\] are 2 elements, and there are 3"),
        (Split(dim=0, cuts=Heads(4, 2)), [(9,)], "aren't 4 \\+ 2 \\* 2 heads"),
        (Split(dim=2, cuts=Equal(1)), [(3, 3)], "has no dim 2"),
        (Fuse(dim=0, cuts=Equal(2)), [(2, 3), (4, 3)], "part 0 has 2 elements along dim 0, not 3"),
        (Fuse(dim=0), [(2, 3), (2, 4)], "can't be joined"),
        (Fuse(dim=0, cuts=Equal(2)), [(2,), (2,), (2,)], "fuse takes 2 tensors at a time"),
        (Stack(), [(2, 3), (2, 4)], "can't be joined"),
        (Unstack(), [(2,), (2,)], "unstack takes one tensor"),
        (Transpose(order=(1, 0)), [(2,)], "doesn't fit the shape"),
        (Resize(dim=0, before=5, after=3), [(4,)], "dim 0 has 4 elements, not 5"),
    ],
)
def test_what_does_not_fit_is_said(operation: Operation, shapes: list[tuple[int, ...]], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        operation.apply([_source(s, f"t{i}") for i, s in enumerate(shapes)])


@pytest.mark.parametrize(
    ("operation", "why"),
    [
        (Fuse(dim=0), "where to cut"),
        (Resize(dim=0, before=None, after=3), "padded"),
        (Cast(dtype="float32"), "back"),
    ],
)
def test_an_operation_without_an_inverse_says_why(operation: Operation, why: str) -> None:
    back = operation.inverse()
    assert isinstance(back, str)
    assert why in back


def test_integers_are_never_cast() -> None:
    with pytest.raises(ValueError, match="int64 isn't cast"):
        Cast(dtype="bfloat16").apply([source((2,), "int64", "n", "param")])


def test_a_cast_to_the_dtype_that_is_there_is_none() -> None:
    tensor = _source((2,))
    assert Cast(dtype="float32").apply([tensor]) == [tensor]
    assert np.dtype(tensor.dtype) == np.float32
