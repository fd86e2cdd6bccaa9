"""The journal behind the deciding thread: what was decided is durable before it is done, if storage lets
it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from elastic_train.cluster.controller.effect_endings import why_not
from elastic_train.cluster.controller.effects import Done, Effect, Effects, Ending, Failed, Lane
from elastic_train.control.events import Event, JournalDurable, JournalHeldUp
from elastic_train.errors import Fenced
from elastic_train.storage.journal import Journal

log = logging.getLogger(__name__)
WAIT_S = 2.0  # how long a decision waits for its journal: recovery never waits for storage
TOLD_S = 10.0  # when a flush that has no answer is told as trouble of storage
LATE_S = 60.0  # when a flush that has no answer is said to be late


class JournalWriter:
    """Belongs to the deciding thread. One flush is under way at a time. `post` hears when records wait for
    storage, and when they do no longer; `fenced` that a higher term has the journal.
    """

    def __init__(
        self,
        journal: Journal,
        effects: Effects,
        *,
        wait_s: float = WAIT_S,
        told_s: float = TOLD_S,
        post: Callable[[Event], None] = lambda event: None,
        fenced: Callable[[Fenced], None] = lambda error: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal, self._effects, self._wait_s = journal, effects, wait_s
        self._told_s, self._post, self._fenced, self._clock = told_s, post, fenced, clock
        self._since = 0.0  # of the flush that is under way
        self._told = False  # that records wait
        self._idle = threading.Event()
        self._idle.set()

    def flush(self) -> None:
        """Wait a moment until everything is durable. Where the flush before is stuck, nothing is waited for:
        what came since is flushed after it.
        """
        if not self._idle.is_set():
            waited_s = self._clock() - self._since
            if waited_s > self._told_s and not self._told:
                self._tell(f"storage has not answered for {waited_s:.0f} s")
            return
        self._idle.clear()
        self._since = self._clock()
        effect = Effect(
            name="flushing the journal",
            lane=Lane.JOURNAL,
            within_s=LATE_S,
            call=self._write,
            ended=self._ended,
        )
        self._effects.begin(effect)
        if not self._idle.wait(self._wait_s):
            log.warning("the journal is not durable yet: storage is slow")

    def last(self) -> None:
        """Make the rest durable, on the calling thread: after a flush that is under way."""
        self._journal.flush()

    def _write(self) -> None:
        try:
            self._journal.flush()
            if self._told:
                self._told = False
                self._post(JournalDurable(at=0.0))
        finally:
            self._idle.set()  # also where it was late

    def _ended(self, ending: Ending[None]) -> None:
        if isinstance(ending, Failed) and isinstance(ending.error, Fenced):
            self._fenced(ending.error)
        elif not isinstance(ending, Done):
            why = why_not("flushing the journal", ending).detail
            log.warning(
                "the journal is not durable yet; %d records wait, %d were given up: %s",
                self._journal.waiting,
                self._journal.given_up,
                why,
            )
            self._tell(why)

    def _tell(self, problem: str) -> None:
        self._told = True
        self._post(JournalHeldUp(at=0.0, problem=problem))
