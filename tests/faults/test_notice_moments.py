"""Notices while a group evaluates, saves and restores."""

from __future__ import annotations

from typing import Any

import pytest

import elastic_train as et
from elastic_train.cluster import ray_private
from elastic_train.cluster.driver.launch import fit
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.cluster.run_updates import RunUpdate
from elastic_train.control.events import PartWritten, StepCommitted
from elastic_train.control.fault_schedule import AddNode, FaultSchedule, Moment
from elastic_train.storage.store import Store
from elastic_train.testing.single_process_run import train_alone
from elastic_train.testing.slow_samples import SlowSamples
from jobs.pretrain_lm import Pretrain
from tests.faults.conftest import Runs, assert_same_training

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(600)]
NODES, CPUS = 4, 1
STEPS, EVALUATE_EVERY, NOTICE_S = 48, 8, 60.0
KILL_AT = 30


class Slow(Pretrain):
    """Reading takes a while, so that a notice falls into what is going on."""

    def dataset(self) -> SlowSamples:
        return SlowSamples(super().dataset(), 0.08)

    def evaluation(self) -> et.Evaluation:
        made = super().evaluation()
        assert made is not None
        return et.Evaluation(dataset=SlowSamples(made.dataset, 0.1), every=made.every)


class Notices(Chaos):
    """A notice in the evaluation of a step, one between the parts of a checkpoint, one in the group that
    forms after the loss of a node."""

    said: tuple[str, ...] = ()
    generation = 0

    def on_update(self, update: RunUpdate, controller: Any, store: Store) -> None:
        super().on_update(update, controller, store)
        for record in update.records:
            event = record.event
            if record.formed is not None:
                self.generation = record.formed.generation
                if "kill" in self.said:
                    self._once("restore", "n4")
            if isinstance(event, StepCommitted) and event.step == EVALUATE_EVERY:
                self._once("evaluation", "n0")
            if isinstance(event, PartWritten) and event.step > 2 * EVALUATE_EVERY:
                self._once("save", "n1")
            if isinstance(event, StepCommitted) and event.step == KILL_AT and "kill" not in self.said:
                self.said += ("kill",)
                self._leave(self._nodes["n2"])

    def _once(self, moment: str, node: str) -> None:
        if moment not in self.said:
            self.said += (moment,)
            self._say(f"chaos: a notice for {node} during {moment}")
            ray_private.drain_node(self._nodes[node], NOTICE_S)


def test_a_notice_at_any_moment_costs_no_step_of_its_own(runs: Runs) -> None:
    task, spec = runs.spec("moments", workers="1:4", standby=0, max_steps=STEPS)
    options = {**vars(task), "evaluate_every": EVALUATE_EVERY}
    calm = {r.step: (r.ids_digest, r.loss) for r in train_alone(Pretrain(**options), spec)}
    later = FaultSchedule(faults=(AddNode(when=Moment(step=KILL_AT - 8), node="n4"),), seed=0)
    chaos = Notices(runs.cluster, later, print)
    rough = fit(Slow(**options), spec, address=None, local_nodes=0, quiet=False, chaos=chaos)
    assert_same_training(rough, calm)
    assert set(chaos.said) == {"evaluation", "save", "kill", "restore"}
    assert all(entry.step > KILL_AT - 5 for entry in rough.ledger.superseded), "a checkpoint every five steps"
    reports = [entry for entry in rough.ledger.kept if entry.step % EVALUATE_EVERY == 0]
    assert all(dict(entry.metrics) for entry in reports), "each evaluation was completed"
