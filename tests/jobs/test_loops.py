"""Jobs that are loops: they learn, in one process and with short runs."""

from __future__ import annotations

import pytest

from elastic_train.testing.single_process_run import train_alone

pytest.importorskip("sklearn", reason="scikit-learn ships the images of these jobs")
pytestmark = pytest.mark.ring2


def test_a_loop_that_came_from_ray_train_recognises_digits_after_sixty_steps():
    from jobs import from_ray_train

    made = from_ray_train.trainer(max_steps=60)
    reports = train_alone(made.task, made.spec)
    reported = {r.step: dict(r.metrics) for r in reports if r.metrics}
    assert sum(reported[step]["accuracy"] for step in range(51, 61)) / 10 > 0.9


def test_two_networks_train_against_each_other_and_are_measured_on_the_way():
    from jobs import gan_digits

    made = gan_digits.trainer(max_steps=12, every=5)
    reports = train_alone(made.task, made.spec)
    reported: dict[int, dict[str, float]] = {}
    for report in reports:
        reported.setdefault(report.step, {}).update(report.metrics)
    assert [step for step, metrics in reported.items() if "fooled" in metrics] == [5, 10]
    assert all({"critic_loss", "generator_loss"} <= metrics.keys() for metrics in reported.values())
