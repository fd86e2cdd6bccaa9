from __future__ import annotations

import math
from typing import Any

import pytest

from elastic_train.control.cadence import (
    FIRST_SAVE_S,
    LEAST_SHARE,
    PRIOR_MTBF_S,
    UNCOVERED_MTBF_S,
    Measured,
    explained,
    interval_s,
    mtbf_s,
    peer_interval_s,
)

pytestmark = pytest.mark.ring0


def measured(**values: Any) -> Measured:
    fields: dict[str, Any] = {
        "save_s": 2.0,
        "cost_s": None,
        "elapsed_s": 0.0,
        "failures": 0,
        "peers": False,
    }
    return Measured(**{**fields, **values})


def test_the_interval_is_youngs():
    assert interval_s(measured()) == math.sqrt(2 * 2.0 * PRIOR_MTBF_S)


def test_more_failures_mean_more_checkpoints():
    calm = interval_s(measured(elapsed_s=3600.0))
    rough = interval_s(measured(elapsed_s=3600.0, failures=20))
    assert rough < calm / 4


def test_a_save_is_never_asked_for_more_often_than_one_takes():
    assert interval_s(measured(save_s=500.0, elapsed_s=3600.0, failures=1000)) == 500.0


def test_before_anything_is_measured_the_first_save_comes_early():
    assert interval_s(measured(save_s=None)) == FIRST_SAVE_S


def test_a_save_that_costs_less_than_it_takes_is_charged_what_it_costs():
    assert interval_s(measured(cost_s=0.5)) == math.sqrt(2 * 0.5 * PRIOR_MTBF_S)
    assert interval_s(measured(cost_s=0.0)) == math.sqrt(2 * LEAST_SHARE * 2.0 * PRIOR_MTBF_S)


def test_with_peer_memory_storage_answers_few_failures_and_is_written_less_often():
    assert interval_s(measured(peers=True)) == math.sqrt(2 * 2.0 * UNCOVERED_MTBF_S)


def test_the_interval_is_explained_in_steps_and_with_its_reasons():
    said = explained(measured(cost_s=0.5), step_s=3.0)
    assert said == (
        "every 60 s, about 20 steps: each takes 0.5 s from training and 2 s to be durable, a failure is "
        "expected every 60 min"
    )
    assert explained(measured(save_s=None), step_s=0.0) == "the first after 60 s"


def test_observation_outweighs_belief_in_time():
    assert mtbf_s(elapsed_s=1e6, failures=100) == pytest.approx(1e4, rel=0.01)


def test_peer_memory_is_filled_as_often_as_it_costs_two_percent_and_never_less_than_youngs_interval():
    assert peer_interval_s(0.0) == 0.0
    assert peer_interval_s(0.01) == pytest.approx(0.5)
    assert peer_interval_s(1000.0) == pytest.approx(math.sqrt(2 * 1000.0 * PRIOR_MTBF_S))
