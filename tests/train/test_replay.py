"""A lost stage of a pipeline comes back from its base and its neighbours' logs, equal to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from elastic_train.config import RunSpec
from elastic_train.data.loader import Loader
from elastic_train.data.numbered import numbered
from elastic_train.data.order import SampleOrder
from elastic_train.geometry.fragments import Fragments
from elastic_train.planner.plan import Mesh, Plan
from elastic_train.recovery.evidence import Vote
from elastic_train.testing.chain import ChainTask
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool, PerRank
from elastic_train.train import document as documents
from elastic_train.train import expected, seeded
from elastic_train.train.assemble import assemble
from elastic_train.train.boundary.crossing import Crossing
from elastic_train.train.boundary.log import BoundaryLog, Room
from elastic_train.train.boundary.replay import Crew, Replayer
from elastic_train.train.fragments import parts
from elastic_train.train.group import Group
from elastic_train.train.serving import Index
from elastic_train.train.step import Stepper
from elastic_train.train.user_code import Border
from tests.train.test_axes import SPLITS, spec

pytestmark = pytest.mark.ring2

State = dict[str, Any]
STEPS = 5


def log_boundaries(state: State) -> None:
    shards = state["member"].held.current
    shards.log = state["log"] = BoundaryLog(Room(memory=1 << 24, waiting=1 << 24))


def kept_for(state: State, stage: int) -> tuple[dict[Crossing, torch.Tensor], dict[int, Vote], Any]:
    """What this rank's log has for a stage, the outcomes of votes, and its span."""
    log: BoundaryLog = state["log"]
    log.flush()
    shards = state["member"].held.current
    sent = {c: log.read(c) for c in log.crossings(shards.place.stage, stage)}
    return sent, {step: log.vote(step) for step in range(1, STEPS + 1)}, log.span()


def part_of(state: State) -> tuple[Fragments, list[np.ndarray], dict[str, Any]]:
    """All that this rank holds: boxes, bytes, scalars."""
    member = state["member"]
    shards = member.held.current
    table = member.holds(shards.generation)
    return table, member.read(shards.generation, shards.step, table), member.document(shards.generation)


class Neighbours:
    """Logs that came from elsewhere."""

    def __init__(self, sent: dict[Crossing, torch.Tensor], votes: dict[int, Vote]) -> None:
        self._sent, self._votes = sent, votes

    def read(self, crossing: Crossing) -> torch.Tensor:
        return self._sent[crossing].clone()

    def vote(self, step: int) -> Vote:
        return self._votes[step]


def replay(
    state: State,
    task: ChainTask,
    run: RunSpec,
    plan: Plan,
    rank: int,
    base: tuple[Fragments, list[np.ndarray], dict[str, Any]],
    kept: tuple[dict[Crossing, torch.Tensor], dict[int, Vote]],
    crew: tuple[int, int, str, int, int] | None,
) -> tuple[Fragments, list[np.ndarray]]:
    """Replay a stage in this process; all that it then holds."""
    device = torch.device("cpu")
    border = Border(worker="r", node="r", rank=rank, generation=1, broken=lambda: False)
    shards = assemble(task, run, generation=1, rank=rank, plan=plan, mesh=None, device=device, border=border)
    table, data, document = base
    kinds = expected.kinds_of(shards, table)
    filled = expected.memory_for(shards, kinds, kinds)
    Index(parts(shards, extra=filled)).write(table, data)
    documents.restore(shards, document, filled)
    dataset = numbered(task.dataset())
    group = Group(
        generation=1,
        rank=0,
        world_size=1,
        store_host="",
        store_port=0,
        address="127.0.0.1",
        device="cpu",
        form_timeout_s=10.0,
    )
    neighbours = Neighbours(*kept)
    stepper = Stepper(
        task=task,
        spec=run,
        shards=shards,
        group=group,
        order=SampleOrder(len(dataset), run.batch),
        loader=Loader(dataset, seed=run.batch.seed, seeding=seeded.sample),
        border=border,
        mark=lambda phase, step, micro: None,
        replayed=neighbours,
    )
    ours = None
    if crew is not None:
        number, size, host, port, unique = crew
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"crew{unique}", store), rank=number, world_size=size
        )
        assert dist.group.WORLD is not None
        ours = Crew(rank=number, size=size, group=dist.group.WORLD)
    try:
        Replayer(stepper, shards, run, neighbours, ours).run(STEPS)
    finally:
        if crew is not None:
            dist.destroy_process_group()
    index = Index(parts(shards))
    return index.table(), index.read(index.table())


class Lost:
    """A pipeline of three stages that was logged from the start, what each rank began and ended with."""

    def __init__(self, pool: GlooPool, generations: Iterator[int], run: RunSpec) -> None:
        self.pool, self.run, self.task = pool, run, ChainTask()
        self._generations = generations
        gang = Gang(pool, generations, self.task, run)
        self.plan = gang.plan_on(Mesh(pp=3), stages=SPLITS[3])
        gang.form(self.plan)
        ranks = list(gang.processes)
        pool.run(log_boundaries, ranks=ranks)
        self.base = pool.run(part_of, ranks=ranks)
        gang.run()
        self.final = pool.run(part_of, ranks=ranks)

    def kept(self, stage: int) -> tuple[dict[Crossing, torch.Tensor], dict[int, Vote]]:
        sent: dict[Crossing, torch.Tensor] = {}
        votes: dict[int, Vote] = {}
        for rank in {0, 1, 2} - {stage}:
            found, votes, span = self.pool.run(kept_for, stage, ranks=[rank])[0]
            assert span == (1, STEPS)
            sent |= found
        return sent, votes

    def replayed(self, stage: int, workers: int) -> list[tuple[Fragments, list[np.ndarray]]]:
        crews: list[Any] = [None]
        if workers > 1:
            store = (self.pool.store_host, self.pool.store_port)
            unique = next(self._generations)
            crews = [(number, workers, *store, unique) for number in range(workers)]
        ranks = list(range(4 - workers, 4))
        self.pool.run(leave, ranks=ranks)
        return self.pool.run(
            replay,
            self.task,
            self.run,
            self.plan,
            stage,
            self.base[stage],
            self.kept(stage),
            PerRank(crews),
            ranks=ranks,
        )

    def assert_same(self, stage: int, found: tuple[Fragments, list[np.ndarray]]) -> None:
        table, data, _ = self.final[stage]
        expected_bytes = {table.names[int(table.key[row])]: data[row] for row in range(len(table))}
        names, raw = found
        got = {names.names[int(names.key[row])]: raw[row] for row in range(len(names))}
        assert got.keys() == expected_bytes.keys()
        for name, values in expected_bytes.items():
            assert np.array_equal(got[name], values), f"{name} differs"


def leave(state: State) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_any_lost_stage_replays_to_the_bit_alone_and_shared(
    pool: GlooPool, new_generation: Iterator[int], precision: str
) -> None:
    """Clipping, dropout, a tied embedding on the first and the last stage, a partial batch."""
    lost = Lost(pool, new_generation, spec(precision=precision))
    before = lost.base[1][1]
    assert not all(np.array_equal(a, b) for a, b in zip(before, lost.final[1][1], strict=False))
    for stage in (0, 1, 2):
        (found,) = lost.replayed(stage, 1)
        lost.assert_same(stage, found)
    for workers in (2, 3):
        kept = lost.kept(1)
        assert kept[0]
        for found in lost.replayed(1, workers):
            lost.assert_same(1, found)
