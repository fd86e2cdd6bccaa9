"""Bytes are brought by several holders at once into the memory that waits for them, and by nobody else."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from elastic_train.cluster.byte_stream import Arrivals, BrokenOff, Door, bring
from elastic_train.errors import GroupBroken

pytestmark = pytest.mark.ring1
HOST = "127.0.0.1"


def sizes(seed: int) -> list[int]:
    """Many small ones, empty ones among them, and some that are larger than what a socket holds."""
    draw = random.Random(seed)
    return [draw.choice((0, 1, 7, 4096, 3_000_000)) for _ in range(20)]


def given(seed: int) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 256, size, np.uint8) for size in sizes(seed)]


def memory(arrays: list[np.ndarray], whole: list[int]) -> Iterator[memoryview]:
    for number, array in enumerate(arrays):
        yield array.data
        whole.append(number)


def nothing() -> None:
    return None


def test_what_several_holders_bring_is_in_its_memory_in_order() -> None:
    holders = range(4)
    sent = [given(seed) for seed in holders]
    came = [[np.zeros_like(array) for array in arrays] for arrays in sent]
    whole: list[list[int]] = [[] for _ in holders]
    with Arrivals(HOST) as arrivals:
        doors = [arrivals.door() for _ in holders]
        threads = [
            threading.Thread(target=bring, args=(arrays, door), kwargs={"generation": 1})
            for arrays, door in zip(sent, doors, strict=True)
        ]
        for thread in threads:
            thread.start()
        wanted = {door.ticket: memory(came[i], whole[i]) for i, door in enumerate(doors)}
        arrivals.take(wanted, nothing)
        for thread in threads:
            thread.join()
    for i in holders:
        assert whole[i] == list(range(len(sent[i])))
        for there, here in zip(sent[i], came[i], strict=True):
            np.testing.assert_array_equal(there, here)


def test_a_stranger_brings_nothing() -> None:
    here = np.zeros(8, np.uint8)
    with Arrivals(HOST) as arrivals:
        door = arrivals.door()
        guessed = Door(host=door.host, port=door.port, ticket=bytes(len(door.ticket)))
        with socket.create_connection((door.host, door.port)) as stranger:
            stranger.sendall(guessed.ticket + bytes([9] * 8))
            thread = threading.Thread(
                target=bring, args=([np.full(8, 5, np.uint8)], door), kwargs={"generation": 1}
            )
            thread.start()
            arrivals.take({door.ticket: memory([here], [])}, nothing)
            thread.join()
    assert here.tolist() == [5] * 8
    assert "ticket" not in repr(door)


def test_a_holder_that_ends_early_is_told_by_its_ticket() -> None:
    with Arrivals(HOST) as arrivals:
        door = arrivals.door()
        bring([np.zeros(3, np.uint8)], door, generation=1)
        with pytest.raises(BrokenOff) as raised:
            arrivals.take({door.ticket: memory([np.zeros(8, np.uint8)], [])}, nothing)
    assert raised.value.ticket == door.ticket


def test_whoever_waits_looks_whether_to_go_on() -> None:
    def broken() -> None:
        raise GroupBroken(generation=3, reason="a member is gone")

    with Arrivals(HOST) as arrivals:
        door = arrivals.door()
        with pytest.raises(GroupBroken, match="a member is gone"):
            arrivals.take({door.ticket: memory([np.zeros(8, np.uint8)], [])}, broken)


def test_where_nobody_waits_any_more_the_group_is_broken() -> None:
    with Arrivals(HOST) as arrivals:
        door = arrivals.door()
    with pytest.raises(GroupBroken, match=r"could not be brought to 127\.0\.0\.1"):
        bring([np.zeros(8, np.uint8)], door, generation=3)
