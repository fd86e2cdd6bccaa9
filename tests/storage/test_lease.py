"""The lease: a polite refusal while another controller lives, and nothing that the fence would need."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from elastic_train.errors import Fenced, LeaseHeld, StorageError
from elastic_train.storage.commit_log import CommitLog
from elastic_train.storage.lease import PATH, Lease, Tenure
from elastic_train.storage.memory_store import MemoryStore
from elastic_train.testing.faulty_store import FaultyStore, Hold

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


def test_a_late_word_of_a_succeeded_holder_ends_nobody_who_holds_the_newest_term() -> None:
    world = World()
    hold = Hold(operation="write", call=3, reached=threading.Event(), go=threading.Event())
    store = MemoryStore()
    partitioned = FaultyStore(store, [hold])
    log = CommitLog(store)
    first = Lease(partitioned, holder="a", lease_s=10.0, clock=lambda: world.now, sleep=world.sleep)
    first.acquire()
    first.renew(log.begin_term("a"))
    late = threading.Thread(target=first.renew, args=(1,))  # it looked, and its write is on the way
    late.start()
    hold.reached.wait()
    second = lease(store, "b", world)
    second.acquire()
    second.renew(log.begin_term("b"))
    hold.go.set()
    late.join()
    held = second.look()
    assert held is not None
    assert held.holder == "a"
    second.renew(2)  # puts it right
    with pytest.raises(Fenced, match="term 2 owns"):
        first.renew(1)
    assert second.look() == Tenure(holder="b", term=2, renewals=2, lease_s=10.0, turn=2)


def test_a_candidate_that_took_the_lease_and_began_no_term_ends_nobody() -> None:
    world, store = World(), MemoryStore()
    log = CommitLog(store)
    holder = lease(store, "a", world)
    holder.acquire()
    holder.renew(log.begin_term("a"))
    lease(store, "b", world).acquire()  # the holder was paused for that long
    holder.renew(1)
    log.begin_term("b")
    lease(store, "b", world).acquire()
    with pytest.raises(Fenced):
        holder.renew(1)


def test_a_lease_is_watched_over_its_own_length_and_not_the_candidate_s() -> None:
    world, store = World(), MemoryStore()
    long = Lease(store, holder="a", lease_s=60.0, clock=lambda: world.now, sleep=world.sleep)
    long.acquire()
    renewed = [20.0]

    def renew() -> None:
        if world.now >= renewed[0]:
            renewed[0] += 20.0
            long.renew(1)

    world.act = renew
    with pytest.raises(LeaseHeld, match="a renewed its lease"):
        lease(store, "b", world).acquire()
    world.act = lambda: None
    began = world.now
    lease(store, "b", world).acquire()
    assert world.now - began >= 60.0


def test_a_release_is_heard_although_a_late_word_covers_the_holder_s() -> None:
    world, store = World(), MemoryStore()
    first, second = lease(store, "a", world), lease(store, "b", world)
    first.acquire()
    word = store.read(PATH)
    second.acquire()
    store.write(PATH, word)
    second.release()
    now = world.now
    lease(store, "c", world).acquire()
    assert world.now == now


def test_words_of_a_newer_release_are_left_out() -> None:
    store = MemoryStore()
    store.write(PATH, b'{"holder": "a", "released": true, "news": 1}')
    assert lease(store, "b", World()).look() == Tenure(holder="a", released=True)
