"""Which variables of a loop training depends on, and which are only told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from elastic_train.train.custom.loop_variables import body_of, carried, flowing, paired

pytestmark = pytest.mark.ring2


def summed(turns: Any, train: Any) -> None:
    total = 0.0
    for turn in turns:
        train(turn)
        total += turn
    print(total)


def logged_at_times(turns: Any, train: Any) -> None:
    total, last = 0.0, 0
    for turn in turns:
        train(turn)
        total = 0.9 * total + turn
        if turn - last > 1:
            print("mean", total)
            last = turn
        else:
            print("")


def weighed(turns: Any, train: Any) -> None:
    total = 0.0
    for turn in turns:
        train(turn / (1 + total))
        total += turn


def by_way_of_another(turns: Any, train: Any) -> None:
    total = 0.0
    for turn in turns:
        factor = 1 / (1 + total)
        scaled = factor * turn
        train(scaled)
        total += turn


def decides(turns: Any, train: Any) -> None:
    best = 10.0
    for turn in turns:
        if turn > best:
            return
        train(turn)
        best = min(best, turn)


def decides_by_way_of_a_flag(turns: Any, train: Any) -> None:
    best, factor = 10.0, 1.0
    for turn in turns:
        if turn < best:
            best = turn
            factor = 0.5
        train(turn * factor)


def computed_anew(turns: Any, train: Any) -> None:
    total = 0.0
    for turn in turns:
        total = turn * 2
        train(total)


def found(loop: Callable[..., None]) -> str | None:
    names: list[str] = []

    def turns() -> Iterator[int]:
        import sys

        frame = sys._getframe(1)
        assert body_of(frame)
        names.extend(carried(frame))
        yield 1

    loop(turns(), lambda turn: None)
    return flowing(loop.__code__, set(names))


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        (summed, None),
        (logged_at_times, None),
        (computed_anew, None),
        (weighed, "total"),
        (by_way_of_another, "total"),
        (decides, "best"),
        (decides_by_way_of_a_flag, "best"),
    ],
)
def test_a_variable_that_training_depends_on_is_told_from_one_that_is_printed(
    loop: Callable[..., None], expected: str | None
) -> None:
    assert found(loop) == expected


class Batch(list[int]):
    """Passes for one of the library's."""

    seen: ClassVar[set[str]] = set()

    def __iter__(self) -> Iterator[int]:
        import sys

        frame = sys._getframe(1)
        yield from (1, 2)
        Batch.seen |= paired(frame)


Batch.__module__ = "elastic_train.batch"


def pairs(batches: Any, train: Any) -> None:
    for batch in batches:
        made = []
        for turn in batch:
            made.append(turn * 2)
        for turn, own in zip(batch, made, strict=True):
            train(turn + own)


def reads_all(batches: Any, train: Any) -> None:
    for batch in batches:
        made = []
        for turn in batch:
            made.append(turn * 2)
        for turn in batch:
            train(turn + sum(made))


def reads_within(batches: Any, train: Any) -> None:
    for batch in batches:
        made = [1]
        for turn in batch:
            made.append(turn * made[-1])
        for turn, own in zip(batch, made, strict=False):
            train(turn + own)


def never_made_anew(batches: Any, train: Any) -> None:
    made: list[int] = []
    for batch in batches:
        for turn in batch:
            made.append(turn * 2)
        for turn, own in zip(batch, made, strict=False):
            train(turn + own)


@pytest.mark.parametrize(
    ("loop", "expected"),
    [(pairs, {"made"}), (reads_all, set()), (reads_within, set()), (never_made_anew, set())],
)
def test_a_list_that_gives_micro_batches_back_what_they_gave_is_told(
    loop: Callable[..., None], expected: set[str]
) -> None:
    Batch.seen = set()
    loop([Batch()], lambda turn: None)
    assert Batch.seen == expected
