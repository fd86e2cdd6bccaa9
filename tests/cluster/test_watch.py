"""What is concluded of what Ray says of nodes."""

from __future__ import annotations

import pytest

from elastic_train.cluster.controller.liveness_watch import Deadlines

pytestmark = pytest.mark.ring0


def heard(*words: float) -> float | None:
    deadlines = Deadlines()
    for word in words:
        deadlines.hear("a", word)
    assert deadlines.of("b") is None
    return deadlines.of("a")


def test_of_two_notices_of_a_node_the_earlier_deadline_counts() -> None:
    assert heard() is None
    assert heard(1e9) == 1e9, "a drain without a deadline"
    assert heard(1e9, 120.0, 25.0) == 25.0
    assert heard(25.0, 90.0) == 25.0, "nobody takes a notice back"


def test_a_deadline_that_is_heard_again_is_the_same_to_the_bit() -> None:
    assert heard(30.0, 30.3, 29.7, 29.4) == 30.0
