"""What the processes of `replay` do: train as stages of a pipeline, log, and replay a stage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import elastic_train as et
from benchmarks.problem import Problem
from elastic_train.checkpoint.merging import merged
from elastic_train.geometry.fragments import Fragments
from elastic_train.models.llama import Llama
from elastic_train.recovery.evidence import Vote
from elastic_train.train.boundary.crossing import Crossing
from elastic_train.train.rank_assignment import ReplayAssignment
from elastic_train.train.state.fragment_index import FragmentIndex
from elastic_train.train.state.live_fragments import parts

Rank = dict[str, Any]
Named = dict[tuple[str, str], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Staged(Problem):
    """The problem of the other benchmarks, cut into stages."""

    def parallelize(self) -> et.Rules:
        return Llama.rules()


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """All that a process held: boxes, bytes, scalars."""

    table: Fragments
    data: list[np.ndarray]
    document: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What stages logged, and the outcomes of votes."""

    tensors: dict[Crossing, torch.Tensor]
    votes: dict[int, Vote]

    def read(self, crossing: Crossing) -> torch.Tensor:
        return self.tensors[crossing].clone()

    def vote(self, step: int) -> Vote:
        return self.votes[step]

    def received_by(self, stages: tuple[int, int]) -> Sent:
        """What a replay of stages reads."""
        inside = range(*stages)
        return Sent(
            tensors={c: t for c, t in self.tensors.items() if c.target in inside and c.source not in inside},
            votes=self.votes,
        )

    def crossing(self, stage: int, other: int) -> int:
        """Bytes between two stages, both ways."""
        return sum(t.nbytes for c, t in self.tensors.items() if {c.source, c.target} == {stage, other})


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Seconds to restore stages and to replay them, and of the processor for it.

    `off_by` is the largest difference to what the stages came to, relative to a tensor's largest value.
    """

    restore_s: float
    seconds: float
    processor_s: float
    off_by: float


def logs(number: int) -> bool:
    """Whether a block of steps is logged. Block 0 warms up; of each two one is, the first or the second."""
    pair, second = divmod(number - 1, 2)
    return number > 0 and second == (pair + 1) % 2


def log_in_turns(rank: Rank, block: int) -> None:
    """Keep the log in some blocks of steps; note when each update begins, by the clock and the processor."""
    shards = rank["member"].held.current
    log, shards.log = shards.log, None
    assert log is not None
    rank["marks"] = []

    def fault(phase: str, step: int, micro_batch: int) -> None:
        if phase == "optimizer":
            rank["marks"].append((time.perf_counter(), time.process_time()))
            shards.log = log if logs(step // block) else None  # of the step that follows
            log.forget(step - 2 * block)  # as after a checkpoint: memory is used again

    rank["faults"] = fault


def marks(rank: Rank) -> list[tuple[float, float]]:
    return rank["marks"]


def part_of(rank: Rank) -> Base:
    member = rank["member"]
    shards = member.held.current
    table = member.held.table(shards.generation)
    data = member.held.read(shards.generation, shards.step, table)
    return Base(table=table, data=data, document=member.document(shards.generation))


def end_of(rank: Rank) -> Named:
    base = part_of(rank)
    return _by_name(base.table, base.data)


def count_processors(rank: Rank) -> None:
    rank["processor_s"] = time.process_time()


def processors(rank: Rank) -> float:
    """Seconds of the processor since `count_processors`."""
    return time.process_time() - rank["processor_s"]


def sent_to(rank: Rank, steps: int) -> tuple[dict[Crossing, torch.Tensor], dict[int, Vote]]:
    """All that this stage logged."""
    shards = rank["member"].held.current
    log, stage = shards.log, shards.place.stage
    log.flush()
    targets = (stage - 1, stage + 1)
    found = {c: log.read(c) for target in targets for c in log.crossings(stage, target)}
    return found, {step: log.vote(step) for step in range(1, steps + 1)}


def expect(rank: Rank, ended: Sequence[Named]) -> None:
    """What each stage ended with. The state that trained is let go of."""
    rank["expected"] = {name: values for stage in ended for name, values in stage.items()}
    rank["member"].held.replace(None)


def replay(rank: Rank, assignment: ReplayAssignment, bases: Sequence[Base], sent: Sent) -> Timed:
    member, steps = rank["member"], max(sent.votes)
    if dist.is_initialized():
        dist.destroy_process_group()
    member.substitute(assignment)
    began = time.perf_counter()
    needs = member.forming.needs(Fragments.concat([base.table for base in bases]))
    rows = {name: values for base in bases for name, values in _by_name(base.table, base.data).items()}
    member.forming.fill(needs, [rows[needs.names[int(needs.key[row])]] for row in range(len(needs))])
    member.load(merged([base.document for base in bases]))
    restored = time.perf_counter() - began
    if len(assignment.substitute.ranks) > 1:
        dist.barrier()
    began, processor = time.perf_counter(), time.process_time()
    member.replay(steps, sent)
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    (shards,) = member.held.every()
    index = FragmentIndex(parts(shards))
    found = _by_name(index.table(), index.read(index.table()))
    off_by = max(_off_by(found[name], rank["expected"][name]) for name in found)
    member.held.replace(None)
    return Timed(restore_s=restored, seconds=seconds, processor_s=processor, off_by=off_by)


def _by_name(table: Fragments, data: Sequence[np.ndarray]) -> Named:
    return {table.names[int(table.key[row])]: data[row] for row in range(len(table))}


def _off_by(found: np.ndarray, expected: np.ndarray) -> float:
    if np.array_equal(found, expected):
        return 0.0
    a, b = found.view(np.float32), expected.view(np.float32)
    return float(np.abs(a - b).max() / np.abs(b).max())
