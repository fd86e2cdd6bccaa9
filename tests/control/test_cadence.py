from __future__ import annotations

import math

import pytest

from elastic_train.control.cadence import FIRST_SAVE_S, PRIOR_MTBF_S, interval_s, mtbf_s, peer_interval_s

pytestmark = pytest.mark.ring0


def test_the_interval_is_youngs():
    assert interval_s(save_s=2.0, elapsed_s=0.0, failures=0) == math.sqrt(2 * 2.0 * PRIOR_MTBF_S)


def test_more_failures_mean_more_checkpoints():
    calm = interval_s(save_s=2.0, elapsed_s=3600.0, failures=0)
    rough = interval_s(save_s=2.0, elapsed_s=3600.0, failures=20)
    assert rough < calm / 4


def test_a_save_is_never_asked_for_more_often_than_one_takes():
    assert interval_s(save_s=500.0, elapsed_s=3600.0, failures=1000) == 500.0


def test_before_anything_is_measured_the_first_save_comes_early():
    assert interval_s(save_s=None, elapsed_s=0.0, failures=0) == FIRST_SAVE_S


def test_observation_outweighs_belief_in_time():
    assert mtbf_s(elapsed_s=1e6, failures=100) == pytest.approx(1e4, rel=0.01)


def test_peer_memory_is_filled_as_often_as_it_costs_two_percent_and_never_less_than_youngs_interval():
    assert peer_interval_s(0.0) == 0.0
    assert peer_interval_s(0.01) == pytest.approx(0.5)
    assert peer_interval_s(1000.0) == pytest.approx(math.sqrt(2 * 1000.0 * PRIOR_MTBF_S))
