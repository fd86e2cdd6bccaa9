"""Storage that takes longer for a checkpoint than the steps up to the next: `pressure` says what happens."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

import pytest

from elastic_train.cluster.driver.launch import fit
from elastic_train.config import Checkpoints
from elastic_train.control.events import CheckpointCommitted, StepCommitted
from tests.faults.conftest import Runs, assert_same_training

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(300)]
NODES, CPUS = 3, 1
STEPS, EVERY, SAVE_S = 15, 3, 1.5
ADAM = 12  # bytes of state for each parameter


@pytest.mark.parametrize("pressure", ["wait", "skip", "coalesce"])
def test_a_checkpoint_that_is_due_while_the_last_one_is_written(
    runs: Runs, pressure: Literal["wait", "skip", "coalesce"]
) -> None:
    task, spec = runs.spec(f"pressure-{pressure}", workers="2:2", standby=0, max_steps=STEPS)
    state = ADAM * sum(parameter.numel() for parameter in task.model().parameters())
    each = state / 2 / SAVE_S  # each of two nodes writes a half
    saves = Checkpoints(every=EVERY, peers=None, pressure=pressure, bandwidth=each, keep=STEPS)
    spec = dataclasses.replace(spec, checkpoints=saves)
    result = fit(task, spec, address=None, local_nodes=0, quiet=False)
    assert_same_training(result, runs.calm(steps=STEPS))
    saved = [r.event.stored.step for r in result.records if isinstance(r.event, CheckpointCommitted)]
    due = [*range(EVERY, STEPS + 1, EVERY)]
    seconds = [r.seconds for r in result.records if isinstance(r.event, StepCommitted)]
    waited = sum(later - earlier > SAVE_S / 2 for earlier, later in itertools.pairwise(seconds))
    print(saved, waited)
    if pressure == "wait":
        assert saved == due
        assert waited >= len(due) - 2, "training stood still until the one before was written"
    else:
        assert saved[-1] == STEPS
        assert len(saved) < len(due), "training went on, and some were never taken"
