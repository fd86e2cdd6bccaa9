"""What the planner is told of a task."""

from __future__ import annotations

import pytest

from elastic_train.train.model.meta_shape import model_shape
from elastic_train.train.task import Average
from tests.train.programs import Fit, spec

pytestmark = pytest.mark.ring2


class Averaged(Fit):
    def average(self) -> Average:
        return Average(decay=0.9)


def test_an_average_takes_the_memory_of_one_more_state() -> None:
    plain, averaged = model_shape(Fit(), spec(1)), model_shape(Averaged(), spec(1))
    assert (plain.slots, averaged.slots) == (2, 3)
