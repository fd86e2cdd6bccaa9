"""What the processes of `replay` do: train as stages of a pipeline, log, and replay a stage."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

import elastic_train as et
from benchmarks.problem import Problem
from elastic_train.geometry.fragments import Fragments
from elastic_train.models.llama import Llama
from elastic_train.planner.plan import Plan
from elastic_train.recovery.evidence import Vote
from elastic_train.train.boundary.crossing import Crossing
from elastic_train.train.boundary.log import BoundaryLog, Room
from elastic_train.train.boundary.replay import Crew

Rank = dict[str, Any]
Part = tuple[Fragments, list[np.ndarray], dict[str, Any]]
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Staged(Problem):
    """The problem of the other benchmarks, cut into stages."""

    def parallelize(self) -> et.Rules:
        return Llama.rules()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What neighbours logged, and the outcomes of votes."""

    tensors: dict[Crossing, torch.Tensor]
    votes: dict[int, Vote]

    def read(self, crossing: Crossing) -> torch.Tensor:
        return self.tensors[crossing].clone()

    def vote(self, step: int) -> Vote:
        return self.votes[step]


def log_boundaries(rank: Rank) -> None:
    shards = rank["member"].held.current
    shards.log = rank["log"] = BoundaryLog(Room(memory=1024 * MIB, waiting=256 * MIB))


def part_of(rank: Rank) -> Part:
    """All that this process holds: boxes, bytes, scalars."""
    member = rank["member"]
    shards = member.held.current
    table = member.holds(shards.generation)
    return table, member.read(shards.generation, shards.step, table), member.document(shards.generation)


def sent_to(rank: Rank, stage: int, steps: int) -> tuple[dict[Crossing, torch.Tensor], dict[int, Vote]]:
    log: BoundaryLog = rank["log"]
    log.flush()
    found = {c: log.read(c) for c in log.crossings(rank["member"].held.current.place.stage, stage)}
    return found, {step: log.vote(step) for step in range(1, steps + 1)}


def bytes_logged(rank: Rank) -> int:
    log: BoundaryLog = rank["log"]
    log.flush()
    return log.nbytes


def replay(
    rank: Rank, generation: int, plan: Plan, stage: int, base: Part, sent: Sent, crew: Any
) -> tuple[float, float, bool]:
    """Seconds to restore the stage and to replay it, up to the newest step; whether that gave `expected`."""
    member, steps = rank["member"], max(sent.votes)
    table, data, document = base
    if dist.is_initialized():
        dist.destroy_process_group()
    began = time.perf_counter()
    member.stand_in(generation, plan, stage, generation)
    needs = member.needs(table)
    rows = _by_name(table, data)
    member.fill(needs, [rows[needs.names[int(needs.key[row])]] for row in range(len(needs))])
    member.load(document)
    restored = time.perf_counter() - began
    ours = None
    if crew is not None:
        number, size, host, port, prefix = crew
        store = PrefixStore(prefix, TCPStore(host, port, is_master=False, wait_for_workers=False))
        dist.init_process_group("gloo", store=store, rank=number, world_size=size)
        assert dist.group.WORLD is not None
        dist.barrier()
        ours = Crew(rank=number, size=size, group=dist.group.WORLD)
    began = time.perf_counter()
    member.replay(steps, sent, ours)
    replayed = time.perf_counter() - began
    expected = rank["expected"][stage]
    table = member.holds(generation)
    found = _by_name(table, member.read(generation, steps, table))
    same = found.keys() == expected.keys() and all(np.array_equal(found[n], expected[n]) for n in found)
    return restored, replayed, same


def _by_name(table: Fragments, data: list[np.ndarray]) -> dict[tuple[str, str], np.ndarray]:
    return {table.names[int(table.key[row])]: data[row] for row in range(len(table))}


def expect(rank: Rank, parts: list[Part]) -> None:
    """What each stage ended with. The state that trained is let go of."""
    rank["expected"] = [_by_name(table, data) for table, data, _ in parts]
    rank["member"].held.replace(None)


def forget_replayed(rank: Rank) -> None:
    rank["member"].held.replace(None)
