"""What a switch costs a run: the seconds that it stands still, less those of the step done in them.

The next one is taken to cost what the last one took. Before the first, it is what forming the last group
took, with what its first step took beyond a usual one: too much rather than nothing.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_train.control.states import Measurements


def expected_s(measured: Measurements) -> float:
    """Seconds that the next switch is taken to cost."""
    if measured.switch_s > 0.0:
        return measured.switch_s
    return measured.formed_s + max(measured.first_s - measured.step_s, 0.0)


def after_first_step(
    measured: Measurements, *, stood_s: float | None, usual_s: float, first_s: float
) -> tuple[Measurements, str]:
    """Once a group has committed its first step, and a sentence where it follows a switch.

    `stood_s` lie between the last step before the switch and this one, `usual_s` is what a step took before.
    """
    if stood_s is None:
        return replace(measured, first_s=first_s), ""
    switch_s, thought_s = max(stood_s - usual_s, 0.0), expected_s(measured)
    said = f"the switch took {switch_s:.2g} s beside it, {thought_s:.2g} s were expected"
    return replace(measured, first_s=first_s, switch_s=switch_s), said
