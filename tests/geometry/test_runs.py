"""What is called a run tiles its tensor; whatever is changed in it is seen."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from elastic_train.geometry.box import Box, tiles
from elastic_train.geometry.coverage import untiled
from elastic_train.geometry.fragments import Fragments
from elastic_train.geometry.runs import cut_in_runs

pytestmark = pytest.mark.ring0

SHAPES = ((6,), (4, 3), (2, 5, 3), (), (1, 1), (0, 4))


def random_boxes(chance: np.random.Generator, shape: tuple[int, ...]) -> list[Box]:
    """A tiling along one dim, in any order, now and then with a box changed, doubled or left out."""
    if not shape or 0 in shape:
        return [Box.whole(shape)]
    dim = int(chance.integers(len(shape)))
    inner = chance.choice(np.arange(1, shape[dim] + 1), size=int(chance.integers(0, 3)))
    cuts = [0, *sorted(set(inner.tolist()) - {shape[dim]}), shape[dim]]
    boxes = [
        Box(
            tuple(low if d == dim else 0 for d in range(len(shape))),
            tuple(high - low if d == dim else n for d, n in enumerate(shape)),
        )
        for low, high in itertools.pairwise(cuts)
    ]
    chance.shuffle(boxes)
    at = int(chance.integers(len(boxes)))
    match int(chance.integers(6)):
        case 0:
            boxes.pop(at)
        case 1:
            boxes.append(boxes[at])
        case 2:
            sizes = tuple(max(0, n - int(chance.integers(2))) for n in boxes[at].sizes)
            boxes[at] = Box(boxes[at].offsets, sizes)
        case 3:
            offsets = tuple(o + int(chance.integers(2)) for o in boxes[at].offsets)
            boxes[at] = Box(offsets, boxes[at].sizes)
        case _:
            pass
    return boxes


def test_a_run_is_a_tiling_and_most_tilings_are_runs() -> None:
    chance = np.random.default_rng(0)
    runs = tilings = 0
    for _ in range(400):
        made = {f"t{i}": (shape, random_boxes(chance, shape)) for i, shape in enumerate(SHAPES)}
        rows = [(name, "param", "int8", shape, box) for name, (shape, boxes) in made.items() for box in boxes]
        chance.shuffle(rows)
        fragments = Fragments.of(rows)
        told = dict(zip(fragments.names, cut_in_runs(fragments).tolist(), strict=True))
        right = {
            name: tiles([b for b in boxes if b.numel], Box.whole(s)) for name, (s, boxes) in made.items()
        }
        for (name, _), is_run in told.items():
            assert right[name] or not is_run, made[name]
            runs, tilings = runs + is_run, tilings + right[name]
        there = {name for name, _ in fragments.names}
        assert (untiled(fragments) is None) == all(right[name] for name in there)
    assert 0.6 * tilings < runs < tilings


def test_no_fragments_and_no_dims_are_no_runs() -> None:
    assert cut_in_runs(Fragments.of([])).tolist() == []
    assert cut_in_runs(Fragments.of([("s", "param", "int8", (), Box((), ()))])).tolist() == [False]
