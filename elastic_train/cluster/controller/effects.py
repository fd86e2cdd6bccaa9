"""Effects: run the controller's commands on other threads, each with a lane, a deadline and one end.

An effect has a name, a lane of its urgency, a deadline and a call. It ends exactly once: done, refused,
failed or late. Lanes are served side by side, so what is urgent never waits behind what is slow. A call that
hangs keeps its thread and loses its place; on a lane that keeps order it keeps its place too, and what waits
behind it is late in its turn.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Any, Generic, TypeVar

from elastic_train.cluster.error_accounts import Account, account_of

log = logging.getLogger(__name__)
T = TypeVar("T")


class Lane(Enum):
    """How urgent an effect is."""

    URGENT = "urgent"  # aborts, final reports, stacks, the end
    FORMING = "forming"  # groups, and what they need
    STARTING = "starting"  # processes of workers
    STORAGE = "storage"  # commits and deletions, which never meet
    JOURNAL = "journal"  # records, in order


WIDTH = {Lane.URGENT: 16, Lane.FORMING: 8, Lane.STARTING: 16, Lane.STORAGE: 1, Lane.JOURNAL: 1}
"""How many effects of a lane run at a time. Those of 1 keep their order."""

FIRST_REST_S, LONGEST_REST_S = 0.1, 5.0
"""How long a loop that fails rests at least before its next turn, longer each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Generic[T]):
    """It returned."""

    value: T


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """It was never begun."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """It raised. `account` says whose fault that is."""

    account: Account
    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """It did not end within its deadline; what it still does is not waited for."""

    within_s: float
    begun: bool


Ending = Done[T] | Refused | Failed | Late


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect(Generic[T]):
    """`ended` hears how it ended, on any thread, and must not wait for anything.

    The deadline counts from `begin`, the wait for a place on the lane included. What is `lasting`, such as a
    record in storage, counts whenever it comes true: `ended` then hears Done after Late, too.
    """

    name: str
    lane: Lane
    within_s: float
    call: Callable[[], T]
    ended: Callable[[Ending[T]], None]
    lasting: bool = False


@dataclass(slots=True, eq=False)
class _Task:
    effect: Effect[Any]
    since: float
    begun: bool = False
    ended: bool = False
    placed: bool = False  # it takes up a place on its lane


@dataclass(slots=True)
class _Places:
    width: int
    waiting: deque[_Task] = field(default_factory=deque)
    running: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outstanding:
    """An effect that has not ended."""

    name: str
    lane: Lane
    seconds: float
    begun: bool


class Effects:
    """Safe from any thread. `fault` hears what goes wrong where an ending is told: that is a fault of
    ours.
    """

    def __init__(
        self, *, fault: Callable[[str, Exception], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fault, self._clock = fault, clock
        self._news = threading.Condition()
        self._places = {lane: _Places(width) for lane, width in WIDTH.items()}
        self._open: set[_Task] = set()
        self._due: list[tuple[float, int, _Task]] = []
        self._number = count()
        self._closed: frozenset[Lane] = frozenset()
        self._over = threading.Event()
        threading.Thread(target=self._watch_deadlines, name="deadlines", daemon=True).start()

    def begin(self, effect: Effect[Any]) -> None:
        """Have it done. Returns at once."""
        task = _Task(effect, since=self._clock())
        with self._news:
            if effect.lane not in self._closed:
                self._await(task)
                places = self._places[effect.lane]
                places.waiting.append(task)
                self._fill(places)
                return
            task.ended = True
        self._tell(task, Refused(why="the run is over"))

    def follow(
        self, name: str, future: Future[T], within_s: float, ended: Callable[[Ending[T]], None]
    ) -> None:
        """An effect that another process works on: it takes no thread and no place. Cancels nothing."""
        effect = Effect(
            name=name, lane=Lane.STARTING, within_s=within_s, call=lambda: future.result(0), ended=ended
        )
        task = _Task(effect, since=self._clock(), begun=True)
        with self._news:
            self._await(task)
        future.add_done_callback(lambda _: self._settle(task))

    def every(self, name: str, seconds: float, call: Callable[[], object]) -> None:
        """Call again and again on a thread of its own, until `close`. What one call raises is said, and the
        next one comes: a loop ends for nothing but the end of the run.
        """
        threading.Thread(target=self._repeat, args=(name, seconds, call), name=name, daemon=True).start()

    def close(self, *lanes: Lane) -> None:
        """Begin nothing more on these lanes, and end the loops. What waited there ends as refused."""
        self._over.set()
        with self._news:
            self._closed |= set(lanes)
            refused = [task for lane in lanes for task in self._places[lane].waiting]
            for lane in lanes:
                self._places[lane].waiting.clear()
            refused = [task for task in refused if self._end(task)]
        for task in refused:
            self._tell(task, Refused(why="the run is over"))

    def idle(self, lane: Lane, within_s: float) -> bool:
        """Wait until nothing is done on a lane. False where it took longer."""
        places = self._places[lane]
        with self._news:
            return self._news.wait_for(lambda: not (places.running or places.waiting), within_s)

    def outstanding(self) -> tuple[Outstanding, ...]:
        """What has not ended, oldest first."""
        now = self._clock()
        with self._news:
            tasks = sorted(self._open, key=lambda task: task.since)
            return tuple(
                Outstanding(name=t.effect.name, lane=t.effect.lane, seconds=now - t.since, begun=t.begun)
                for t in tasks
            )

    # -- private

    def _await(self, task: _Task) -> None:
        self._open.add(task)
        heapq.heappush(self._due, (task.since + task.effect.within_s, next(self._number), task))
        self._news.notify_all()

    def _fill(self, places: _Places) -> None:
        """Begin what there is a place for."""
        while places.waiting and places.running < places.width:
            task = places.waiting.popleft()
            task.begun = task.placed = True
            places.running += 1
            name = f"{task.effect.lane.value}: {task.effect.name}"
            threading.Thread(target=self._settle, args=(task,), name=name, daemon=True).start()

    def _settle(self, task: _Task) -> None:
        """Call it, and tell how it ended."""
        ending: Ending[Any]
        try:
            ending = Done(value=task.effect.call())
        except BaseException as error:  # noqa: BLE001 - the one line where what went wrong becomes an ending
            ending = Failed(account=account_of(error), error=error)
        with self._news:
            self._leave(task)
            first = self._end(task)
        if first or (task.effect.lasting and isinstance(ending, Done)):
            self._tell(task, ending)
        else:
            log.warning("%s ended after its deadline: %s", task.effect.name, ending)

    def _end(self, task: _Task) -> bool:
        """Whether it ends now; it does once."""
        if task.ended:
            return False
        task.ended = True
        self._open.discard(task)
        return True

    def _leave(self, task: _Task) -> None:
        if task.placed:
            task.placed = False
            places = self._places[task.effect.lane]
            places.running -= 1
            self._fill(places)
            self._news.notify_all()

    def _tell(self, task: _Task, ending: Ending[Any]) -> None:
        try:
            task.effect.ended(ending)
        except Exception as error:  # noqa: BLE001 - a fault of ours: it ends the run with its reason
            self._fault(task.effect.name, error)

    def _watch_deadlines(self) -> None:
        while True:
            with self._news:
                now = self._clock()
                late: list[_Task] = []
                while self._due and (self._due[0][2].ended or self._due[0][0] <= now):
                    task = heapq.heappop(self._due)[2]
                    if self._end(task):
                        late.append(task)
                        self._give_up(task)
                if not late:
                    self._news.wait(self._due[0][0] - now if self._due else None)
            for task in late:
                self._tell(task, Late(within_s=task.effect.within_s, begun=task.begun))

    def _give_up(self, task: _Task) -> None:
        places = self._places[task.effect.lane]
        if not task.begun:
            places.waiting.remove(task)
        elif places.width > 1:
            self._leave(task)

    def _repeat(self, name: str, seconds: float, call: Callable[[], object]) -> None:
        failed = 0
        while not self._over.is_set():
            try:
                call()
            except Exception as error:
                failed += 1
                if failed.bit_count() == 1:  # at first, and then ever more rarely
                    log.warning("%s failed, %d times in a row", name, failed, exc_info=error)
            else:
                failed = 0
            rest = min(FIRST_REST_S * 2.0 ** min(failed, 10), LONGEST_REST_S) if failed else 0.0
            self._over.wait(max(seconds, rest))
