"""The lease: a polite refusal while another controller lives, and nothing that the fence would need."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elastic_train.errors import Fenced, LeaseHeld, StorageError
from elastic_train.storage.lease import PATH, Lease
from elastic_train.storage.memory_store import MemoryStore

pytestmark = pytest.mark.ring1


class World:
    """Virtual time; whatever lives in it acts at every sleep."""

    def __init__(self) -> None:
        self.now = 0.0
        self.act: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.act()


def lease(store: MemoryStore, holder: str, world: World) -> Lease:
    return Lease(store, holder=holder, lease_s=10.0, clock=lambda: world.now, sleep=world.sleep)


def test_a_free_lease_is_taken_at_once() -> None:
    world, store = World(), MemoryStore()
    lease(store, "a", world).acquire()
    assert world.now == 0.0


def test_a_living_holder_keeps_it_however_late_its_wall_clock_is() -> None:
    world, store = World(), MemoryStore()
    holder = lease(store, "a", world)
    holder.acquire()
    world.act = lambda: holder.renew(1)
    with pytest.raises(LeaseHeld, match="a renewed its lease"):
        lease(store, "b", world).acquire()
    assert world.now <= 10.0


def test_a_silent_holder_loses_it_after_the_lease_time_and_is_told_so() -> None:
    world, store = World(), MemoryStore()
    silent = lease(store, "a", world)
    silent.acquire()
    lease(store, "b", world).acquire()
    assert 10.0 <= world.now < 12.0
    with pytest.raises(Fenced):
        silent.renew(1)


def test_a_released_lease_needs_no_waiting() -> None:
    world, store = World(), MemoryStore()
    first = lease(store, "a", world)
    first.acquire()
    first.renew(1)
    first.release()
    second = lease(store, "b", world)
    second.acquire()
    first.release()  # no longer its own
    assert world.now == 0.0
    second.renew(2)


def test_a_lease_that_cannot_be_read_says_what_to_do() -> None:
    store = MemoryStore()
    store.write(PATH, b"{")
    with pytest.raises(StorageError, match="delete the file"):
        lease(store, "a", World()).acquire()
