"""The benchmark of decisions drives a run through all that control does once for each worker."""

from __future__ import annotations

import pytest

from benchmarks.control import exponent, live
from elastic_train.control.states import Running

pytestmark = pytest.mark.ring0


def test_a_run_is_driven_through_a_loss_a_drain_and_the_loss_of_half_of_its_nodes():
    run = live(24)
    assert isinstance(run.state.phase, Running)
    assert {"start", "form", "step", "save", "peer_stores", "incident", "drain", "half"} == set(run.spent)
    assert len(run.spent["incident"]) >= 24
    assert (run.facts.generation, run.facts.failures) == (4, 0)
    assert len(run.facts.plans[-1][1].workers) == 12


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0])
def test_the_growth_exponent_is_that_of_the_slowest_decision(power):
    results = [{"workers": n, "decide_s": 1e-6 * n**power} for n in (100, 400, 1000)]
    assert exponent(results, "decide_s") == pytest.approx(power)
