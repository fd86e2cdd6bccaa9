from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from elastic_train.control.schedule import (
    FIRST_SAVE_S,
    LEAST_SHARE,
    PRIOR_MTBF_S,
    UNCOVERED_MTBF_S,
    BoundaryDecision,
    IntervalInputs,
    at_boundary,
    explained,
    interval_s,
    mtbf_s,
    peer_interval_s,
    peer_is_due,
    storage_is_due,
)

pytestmark = pytest.mark.ring0


def measured(**values: Any) -> IntervalInputs:
    fields: dict[str, Any] = {
        "save_s": 2.0,
        "cost_s": None,
        "elapsed_s": 0.0,
        "failures": 0,
        "peers": False,
    }
    return IntervalInputs(**{**fields, **values})


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


def boundary(step: int = 7, **given: Any) -> BoundaryDecision:
    settings: dict[str, Any] = {
        "last": False,
        "pausing": False,
        "every": "auto",
        "pressure": "coalesce",
        "asked": False,
        "owed": False,
        "may_be_best": False,
        "no_room_for_storage": False,
        "peers_wanted": False,
    }
    return at_boundary(step=step, **settings | given)


def test_nothing_is_taken_at_a_boundary_where_nothing_is_due():
    assert boundary() == BoundaryDecision(snapshot=False, storage=False, wait=False, owed=False)
    assert boundary(pausing=True) == boundary(), "a pause by itself saves nothing"
    assert boundary(peers_wanted=True) == BoundaryDecision(
        snapshot=True, storage=False, wait=False, owed=False
    )


@pytest.mark.parametrize("why", [{"asked": True}, {"owed": True}, {"last": True}, {"every": 7}])
def test_what_is_due_goes_to_storage(why):
    assert boundary(**why).storage
    assert boundary(**why).snapshot


@pytest.mark.parametrize(
    ("pressure", "waits", "owed"), [("wait", True, False), ("skip", False, False), ("coalesce", False, True)]
)
def test_without_room_the_policy_says_what_happens(pressure, waits, owed):
    taken = boundary(asked=True, no_room_for_storage=True, pressure=pressure)
    assert (taken.storage, taken.wait, taken.owed) == (waits, waits, owed)


@pytest.mark.parametrize("why", [{"last": True}, {"asked": True, "pausing": True}, {"may_be_best": True}])
def test_a_state_that_will_not_be_there_later_waits_for_room(why):
    assert boundary(no_room_for_storage=True, **why).wait


def test_a_best_state_is_left_out_where_pressure_skips():
    assert not boundary(may_be_best=True, pressure="skip").storage


def test_snapshots_to_peer_memory_are_due_by_number_or_by_cost():
    assert [peer_is_due(3, steps=n, seconds=0.0, cost_s=9.0) for n in (2, 3)] == [False, True]
    assert [peer_is_due("auto", steps=1, seconds=s, cost_s=0.02) for s in (0.9, 1.1)] == [False, True]


def test_a_checkpoint_under_way_is_not_superseded_before_its_time():
    due = partial(storage_is_due, measured(save_s=None), progress_s=200.0)
    assert not due(asked_s=None, under_way=False)
    assert [due(asked_s=s, under_way=False) for s in (59.0, 61.0)] == [False, True]
    assert [due(asked_s=s, under_way=True) for s in (61.0, 201.0)] == [False, True]
