"""The check of a GPU with the host in its place: every part runs, and what it does not measure is said."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_check.__main__ import ON_HOST, alone, beside, check, headline, restored, segment
from benchmarks.gpu_check.training import Training

pytestmark = pytest.mark.ring2
CPU, MILLIONS = torch.device("cpu"), 0.3


def test_a_snapshot_is_timed_alone_and_beside_the_step_and_gives_the_state_back() -> None:
    training = Training(MILLIONS, CPU)
    training.step()
    with segment(training.bytes()) as (path, arena):
        single = alone(training, arena)
        assert single["copy_s"] > 0
        assert not single["pinned"]
        pair = beside(training, arena, 2)
        assert pair["step_s"] > 0
        # Two snapshots block for a part of three steps, however the machine shares its time out.
        assert 0 < 2 * pair["blocked_s"] <= 3 * pair["saving_step_s"]
        assert restored(training, MILLIONS, arena)
    assert not path.exists()


@pytest.mark.matrix
def test_a_killed_process_leaves_what_it_committed_and_the_rest_is_named_as_not_measured() -> None:
    found, missing = check(CPU, millions=MILLIONS, steps=2)
    assert found["recovered"]
    assert found["steps_lost"] <= 1
    assert set(ON_HOST) <= set(missing)
    said = headline(found)
    assert (said["restored"], said["recovered"]) == (1.0, 1.0)
    assert said["pinned_gb_s"] is None
    assert said["x_of_bus_limit"] is None
