"""A lost pipeline stage that is replayed in a pool process: what others hand over, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from elastic_train.checkpoint.merging import merged
from elastic_train.geometry.fragments import Fragments
from elastic_train.recovery.evidence import Vote
from elastic_train.train.boundary.crossing import Crossing
from elastic_train.train.rank_assignment import ReplayAssignment
from elastic_train.train.state.fragment_index import FragmentIndex
from elastic_train.train.state.live_fragments import parts

State = dict[str, Any]
Part = tuple[Fragments, list[np.ndarray], dict[str, Any]]
Found = dict[tuple[str, str, tuple[int, ...]], np.ndarray]
"""Bytes by tensor, state and where their box begins."""
Kept = tuple[dict[Crossing, torch.Tensor], dict[int, Vote]]


def part_of(state: State) -> Part:
    """All that this rank holds: boxes, bytes, scalars."""
    member = state["member"]
    shards = member.held.current
    table = member.held.table(shards.generation)
    return table, member.held.read(shards.generation, shards.step, table), member.document(shards.generation)


def kept_for(state: State, stages: tuple[int, int], through: int) -> Kept:
    """What this rank's log has for stages, from the first step to `through`, and the outcomes of votes."""
    shards = state["member"].held.every()[0]
    log = shards.log
    log.flush()
    assert log.span() == (1, through)
    source = shards.place.stage
    sent = {c: log.read(c) for target in range(*stages) for c in log.crossings(source, target)}
    return sent, {step: log.vote(step) for step in range(1, through + 1)}


class Neighbours:
    """Logs that came from elsewhere."""

    def __init__(self, sent: dict[Crossing, torch.Tensor], votes: dict[int, Vote]) -> None:
        self._sent, self._votes = sent, votes

    def read(self, crossing: Crossing) -> torch.Tensor:
        return self._sent[crossing].clone()

    def vote(self, step: int) -> Vote:
        return self._votes[step]


def replay(
    state: State, assignment: ReplayAssignment, bases: Sequence[Part], kept: Kept, through: int
) -> tuple[Found, int]:
    """Replay in this process; what it holds of it then, and the bytes that it logged."""
    member = state["member"]
    member.substitute(assignment)
    had: Found = {}
    for table, data, _ in bases:
        had |= by_box(table, data)
    needs = member.forming.needs(
        bases[0][0] if len(bases) == 1 else Fragments.concat([base[0] for base in bases])
    )
    member.forming.fill(needs, [had[key] for key in by_box(needs, [np.empty(0)] * len(needs))])
    member.load(merged([document for _, _, document in bases]))
    member.replay(through, Neighbours(*kept))
    shards = member.held.every()[-1]
    return held_now(state), shards.log.nbytes if shards.log else 0


def held_now(state: State) -> Found:
    """What the last of this process's shards hold."""
    index = FragmentIndex(parts(state["member"].held.every()[-1]))
    return by_box(index.table(), index.read(index.table()))


def by_box(table: Fragments, data: Sequence[np.ndarray]) -> Found:
    return {
        (*table.names[int(table.key[row])], table.box(row).offsets): data[row] for row in range(len(table))
    }
