"""Replicas that fill their shards together: each byte is read by one of them."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.geometry.fragments import Fragments
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.train.state.replica_exchange import TOGETHER_BYTES, owners, turns
from tests.tasks.tiny import TinyTask, tiny_run


@pytest.mark.ring0
@given(st.lists(st.integers(0, 3 * TOGETHER_BYTES), max_size=40), st.integers(1, 5))
def test_replicas_read_alike_and_a_bounded_part_at_a_time(sizes: list[int], copies: int) -> None:
    nbytes = np.array(sizes, dtype=np.int64)
    owner = owners(nbytes, copies)
    read = [int(nbytes[owner == replica].sum()) for replica in range(copies)]
    assert max(read, default=0) <= sum(sizes) / copies + max(sizes, default=0)
    turn = turns(nbytes, owner, copies)
    for number in np.unique(turn):
        for replica in range(copies):
            several = nbytes[(turn == number) & (owner == replica)]
            assert len(several[several > 0]) <= 1 or several.sum() <= TOGETHER_BYTES // copies + max(several)


def content(boxes: Fragments) -> list[np.ndarray]:
    """Bytes of every box that tell which box they are of."""
    seeds = [zlib.crc32(repr((boxes.names[boxes.key[i]], boxes.box(i))).encode()) for i in range(len(boxes))]
    sizes = boxes.nbytes.tolist()
    return [
        np.random.default_rng(s).integers(256, size=n, dtype=np.uint8)
        for s, n in zip(seeds, sizes, strict=True)
    ]


def filled(state: dict[str, Any], generation: int) -> tuple[int, int]:
    """Bytes that this rank read, and bytes that it needed; all of them have arrived."""
    member, counted = state["member"], []
    member.forming.initialise()
    needs = member.forming.needs()

    def read(boxes: Fragments) -> list[np.ndarray]:
        counted.append(int(boxes.nbytes.sum()))
        return content(boxes)

    assert member.progress().filled_bytes == 0
    member.forming.fill_together(needs, read)
    said = member.progress()
    assert said.filled_bytes == said.needed_bytes == needs.nbytes.sum()
    member.go()
    assert member.progress().needed_bytes == 0
    held = member.held.read(generation, 0, needs)
    assert all(np.array_equal(a, b) for a, b in zip(held, content(needs), strict=True))
    return sum(counted), int(needs.nbytes.sum())


@pytest.mark.ring2
@pytest.mark.parametrize("mesh", [(3, 1), (2, 2), (1, 3)])
def test_each_byte_is_read_once_and_arrives_everywhere(pool: GlooPool, mesh: tuple[int, int]) -> None:
    gang = Gang(pool, TinyTask(), tiny_run(12, max_steps=4))
    plan = gang.plan(*mesh)
    gang.join(plan, range(plan.world_size))
    found = pool.run(filled, gang.generation, ranks=gang.processes)
    read, needed = (sum(column) for column in zip(*found, strict=True))
    assert read * mesh[0] == needed
