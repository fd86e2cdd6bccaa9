"""A replica that went wrong and a node that is slow: found out and put right while a run trains on."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch.distributed as dist
from torch import nn

from elastic_train.cluster.driver.launch import fit
from elastic_train.cluster.driver.result import Result
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.control.events import GroupBroken, Straggling
from elastic_train.control.fault_schedule import FaultSchedule
from jobs.pretrain_lm import Pretrain
from tests.faults.conftest import WHOLE, Runs

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(400)]
NODES, CPUS = 3, 1


@dataclass(frozen=True, kw_only=True)
class Hooked(Pretrain):
    """`mark` is a file that tells which process does its mischief."""

    mark: str

    def model(self) -> nn.Module:
        model = super().model()
        model.register_forward_pre_hook(self.mischief(model))
        return model

    def mischief(self, model: nn.Module) -> Callable[[nn.Module, Any], None]:
        raise NotImplementedError


class Flipped(Hooked):
    """One value of one replica is changed behind everybody's back, once."""

    AT = 20  # forwards of rank 1
    forwards: ClassVar = itertools.count(1)  # outside of the model, whose forward may change nothing

    def mischief(self, model: nn.Module) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            if not model.training or not dist.is_initialized() or dist.get_rank() != 1:
                return
            if (
                next(self.forwards) >= self.AT
                and claimed(self.mark) == os.getpid()
                and not Path(self.mark + ".done").exists()
            ):
                Path(self.mark + ".done").touch()
                next(model.parameters()).data[3, 3] += 1e-3

        return hook


class Lame(Hooked):
    """The process that is rank 2 first is slow as long as it lives."""

    SECONDS = 0.1

    def mischief(self, model: nn.Module) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            if model.training and dist.is_initialized() and dist.get_rank() == 2:
                claimed(self.mark)
            mark = Path(self.mark)
            if mark.exists() and mark.read_text() == str(os.getpid()):
                time.sleep(self.SECONDS)

        return hook


def claimed(mark: str) -> int:
    """The process that wrote the file first; this one, if there was none."""
    try:
        with Path(mark).open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        pass
    return int(Path(mark).read_text() or 0)


def trained(runs: Runs, job: type[Hooked], tmp_path: Path, **changes: Any) -> Result:
    task, spec = runs.spec(tmp_path.name, standby=0, timing=WHOLE, **changes)
    hooked = job(**vars(task), mark=str(tmp_path / "mark"))
    chaos = Chaos(runs.cluster, FaultSchedule(faults=()), print)
    return fit(hooked, spec, address=None, local_nodes=0, quiet=False, chaos=chaos)


def test_a_replica_that_went_wrong_is_outvoted_and_filled_again(runs: Runs, tmp_path: Path) -> None:
    rough = trained(runs, Flipped, tmp_path, workers="3:3", max_steps=24, compare_replicas=2)
    assert (tmp_path / "mark.done").exists()
    assert rough.outcome == "finished"
    assert rough.ledger.superseded == (), "two replicas of three agreed"
    calm = runs.calm(steps=24)
    assert {e.step: e.ids_digest for e in rough.ledger.kept} == {s: ids for s, (ids, _) in calm.items()}
    assert rough.ledger.losses == pytest.approx({s: loss for s, (_, loss) in calm.items()}, rel=1e-2)
    formed = [(r.formed.source, len(r.formed.workers)) for r in rough.records if r.formed]
    assert formed == [("fresh", 3), ("live", 3)], "the process of the corrupt replica stays"
    causes = [r.event.cause for r in rough.records if isinstance(r.event, GroupBroken) and r.event.cause]
    assert any("silent corruption" in cause.detail for cause in causes)


def test_a_slow_node_is_named_and_left_without_losing_a_step(runs: Runs, tmp_path: Path) -> None:
    rough = trained(runs, Lame, tmp_path, workers="2:3", max_steps=120, evict_slower_than=2.0)
    assert rough.outcome == "finished"
    assert rough.ledger.superseded == ()
    found = [r for r in rough.records if isinstance(r.event, Straggling)]
    assert found
    assert found[0].event.rank == 2
    formed = [r.formed for r in rough.records if r.formed]
    assert len(formed[0].workers) == 3
    assert len(formed[1].workers) == 2
    assert formed[1].source == "live"
    assert found[0].event.node not in formed[1].nodes
    losses = {s: loss for s, (_, loss) in runs.calm(steps=120).items()}
    assert rough.ledger.losses == pytest.approx(losses, rel=1e-4)


def test_a_slow_worker_gets_fewer_micro_batches_without_losing_a_step(runs: Runs, tmp_path: Path) -> None:
    rough = trained(runs, Lame, tmp_path, workers="3:3", max_steps=120)
    assert rough.outcome == "finished"
    assert rough.ledger.superseded == ()
    changes = [r.change for r in rough.records if r.change and r.change.kind == "rebalance"]
    formed = [r.formed for r in rough.records if r.formed]
    assert changes
    assert changes[0].workers == (formed[0].workers[2],)
    assert [set(group.workers) for group in formed[1:]] == [set(formed[0].workers)] * (len(formed) - 1)
    assert {group.source for group in formed[1:]} == {"live"}
    calm = runs.calm(steps=120)
    assert {e.step: e.ids_digest for e in rough.ledger.kept} == {s: ids for s, (ids, _) in calm.items()}
    assert rough.ledger.losses == pytest.approx({s: loss for s, (_, loss) in calm.items()}, rel=1e-4)
