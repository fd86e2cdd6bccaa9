"""The benchmark of decisions drives a run through all that control does once for each worker."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from benchmarks.control import Run, exponent, live
from elastic_train.control.states import Running

pytestmark = pytest.mark.ring0


class Counted(Run):
    """Counts Python's instructions in place of seconds."""

    def hear(self, about: str, kind: type[Any], **values: Any) -> None:
        count = 0

        def instruction(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            count += event == "opcode"
            return instruction

        sys.settrace(instruction)
        try:
            super().hear(about, kind, **values)
        finally:
            sys.settrace(None)
        self.spent[about][-1] = float(count)


def test_a_run_is_driven_through_a_loss_a_drain_and_the_loss_of_half_of_its_nodes():
    run = live(24)
    assert isinstance(run.state.phase, Running)
    assert {"start", "form", "step", "save", "peer_stores", "incident", "drain", "rack", "half"} == set(
        run.spent
    )
    assert len(run.spent["incident"]) >= 2 * 24
    assert (run.facts.lineage.generation, run.facts.failures.ever, run.facts.failures.count) == (5, 3, 0)
    assert len(run.facts.lineage.plans[-1][1].workers) == 12


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0])
def test_the_growth_exponent_is_that_of_the_slowest_decision(power):
    results = [{"workers": n, "decide_s": 1e-6 * n**power} for n in (100, 400, 1000)]
    assert exponent(results, "decide_s") == pytest.approx(power)


def test_no_decision_takes_more_than_its_share_of_instructions_in_a_larger_cluster() -> None:
    """Four times the workers: a list of them inside a loop over them would be sixteen times the work."""
    small, large = live(16, Counted), live(64, Counted)
    growth = {about: max(large.spent[about]) / max(small.spent[about]) for about in small.spent}
    assert max(growth.values()) < 6.0, growth
    whole = sum(large.spent["incident"]) / sum(small.spent["incident"])
    assert whole < 6.0, "everybody's words on one loss"


def test_each_of_many_losses_takes_no_look_at_all_workers() -> None:
    """A quarter of four times the workers is lost, one by one: with a look at all of them it is 5.4 times."""
    small, large = live(64, Counted), live(256, Counted)
    assert sum(large.spent["rack"]) / sum(small.spent["rack"]) < 4.5
