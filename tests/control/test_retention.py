from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.config import Checkpoints
from elastic_train.control.retention import kept_slots
from elastic_train.recovery.evidence import Commitment, Stored

pytestmark = pytest.mark.ring0


def commitments(steps: Sequence[int], losses: Sequence[float] = ()) -> list[Commitment]:
    losses = losses or [0.0] * len(steps)
    return [
        Commitment(
            stored=Stored(slot=slot, step=step, generation=1, term=1, path=""), metrics=(("loss", loss),)
        )
        for slot, (step, loss) in enumerate(zip(steps, losses, strict=True), start=1)
    ]


def test_the_newest_are_kept_by_number_not_by_name():
    assert kept_slots(commitments([98, 99, 100, 101, 102]), Checkpoints(keep=2)) == (4, 5)
    assert kept_slots(commitments([9000, 9900, 10000]), Checkpoints(keep=1)) == (3,)


def test_the_best_is_kept_beside_the_newest():
    saved = commitments([1, 2, 3, 4], [0.5, 0.1, 0.3, 0.4])
    assert kept_slots(saved, Checkpoints(keep=1, best="loss")) == (2, 4)
    assert kept_slots(saved, Checkpoints(keep=1, best="loss", best_order="max", keep_best=2)) == (1, 4)


def test_of_equally_good_ones_the_newer_is_kept():
    assert kept_slots(commitments([1, 2, 3], [0.1, 0.1, 0.2]), Checkpoints(keep=1, best="loss")) == (2, 3)


def test_what_has_no_finite_value_is_never_the_best():
    saved = commitments([1, 2, 3], [float("nan"), 0.5, 0.9])
    assert kept_slots(saved, Checkpoints(keep=1, best="loss")) == (2, 3)
    assert kept_slots(saved, Checkpoints(keep=1, best="accuracy")) == (3,)


def test_the_one_in_use_is_kept():
    assert kept_slots(commitments([1, 2, 3]), Checkpoints(keep=1), in_use=1) == (1, 3)


@given(
    steps=st.lists(st.integers(1, 10**6), min_size=1, unique=True),
    keep=st.integers(1, 5),
    best=st.sampled_from([None, "loss"]),
)
def test_at_least_the_newest_always_stays(steps, keep, best):
    saved = commitments(steps)
    slots = kept_slots(saved, Checkpoints(keep=keep, best=best))
    newest = max(saved, key=lambda c: c.stored.step).stored.slot
    assert newest in slots
    assert len(slots) <= keep + 1
