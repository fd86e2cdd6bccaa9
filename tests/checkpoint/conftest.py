"""A run with two tensors and what tests do with it again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.writer import write_part
from elastic_train.geometry.box import Box
from elastic_train.recovery.evidence import Stored

Save = Callable[..., Stored]
Cut = Callable[..., Piece]


@pytest.fixture
def cut() -> Cut:
    """A box of an array as a piece."""

    def make(tensor: str, array: np.ndarray, box: Box | None = None, *, state: str = "param") -> Piece:
        box = box or Box.whole(array.shape)
        return Piece(
            tensor=tensor,
            state=state,
            dtype=array.dtype.name,
            shape=array.shape,
            box=box,
            data=array[box.slices],
        )

    return make


@pytest.fixture
def save(cut: Cut) -> Save:
    """Save and commit step `step`: `w` is 6 x 4 and full of the step, in two parts; `b` is a counter."""

    def make(
        run: RunDirectory,
        *,
        term: int,
        step: int,
        generation: int = 1,
        lineage: Sequence[tuple[int, int]] = ((1, 0),),
        metrics: Sequence[tuple[str, float]] = (),
    ) -> Stored:
        directory = attempt_path(step=step, generation=generation)
        w = np.full((6, 4), step, dtype=np.float32)
        parts = [
            write_part(run.store, directory, 0, [cut("w", w, Box((0, 0), (4, 4))), cut("b", np.arange(3))]),
            write_part(run.store, directory, 1, [cut("w", w, Box((4, 0), (2, 4)))]),
        ]
        assembled = assemble(run.store, directory, parts, {"step": step})
        return run.commit(
            assembled, term=term, generation=generation, step=step, lineage=lineage, metrics=metrics
        )

    return make
