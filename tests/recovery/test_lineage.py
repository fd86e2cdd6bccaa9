from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.recovery.evidence import Fresh, FromStorage, Live, Stored
from elastic_train.recovery.lineage import alive, extend

pytestmark = pytest.mark.ring0

LINEAGE = ((1, 0), (2, 5), (4, 5), (7, 9))


def stored(generation: int, step: int) -> FromStorage:
    return FromStorage(stored=Stored(slot=1, step=step, generation=generation, term=1, path=""))


@pytest.mark.parametrize(
    ("generation", "step", "expected"),
    [
        (1, 0, True),
        (1, 5, True),
        (1, 6, False),
        (2, 5, True),
        (2, 6, False),
        (3, 5, False),
        (4, 9, True),
        (4, 10, False),
        (7, 8, False),
        (7, 9, True),
        (7, 10**6, True),
    ],
)
def test_a_generations_steps_end_where_the_next_one_starts(generation, step, expected):
    assert alive(LINEAGE, generation, step) is expected


def test_nothing_belongs_to_no_lineage():
    assert not alive((), 1, 0)


def test_a_fresh_start_has_no_past():
    assert extend(LINEAGE, Fresh(), 8) == ((8, 0),)


def test_survivors_continue_the_generation_that_they_hold():
    assert extend(LINEAGE, Live(generation=4, step=7), 8) == ((1, 0), (2, 5), (4, 5), (8, 7))


def test_a_checkpoint_continues_the_generation_that_wrote_it():
    assert extend(LINEAGE, stored(1, 3), 8) == ((1, 0), (8, 3))


def test_a_checkpoint_of_unknown_past_starts_a_lineage_with_its_writer():
    assert extend((), stored(3, 12), 8) == ((3, 0), (8, 12))


@given(
    origins=st.lists(
        st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12
    )
)
def test_after_any_past_the_origin_is_alive_and_everything_newer_is_dead(origins):
    lineage = extend((), Fresh(), 1)
    for number, (live, back, ahead) in enumerate(origins, start=2):
        source, first = lineage[-1 - back % len(lineage)]
        later = [start for generation, start in lineage if generation > source]
        step = min((first + ahead, *later))
        origin = Live(generation=source, step=step) if live else stored(source, step)
        lineage = extend(lineage, origin, number)
        assert alive(lineage, source, step)
        assert alive(lineage, number, step)
        assert not alive(lineage, source, step + 1)
        assert [start for _, start in lineage] == sorted(start for _, start in lineage)
