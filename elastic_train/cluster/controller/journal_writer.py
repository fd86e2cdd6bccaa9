"""The journal behind the deciding thread: what was decided is durable before it is done, if storage lets
it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from elastic_train.cluster.controller.effect_endings import why_not
from elastic_train.cluster.controller.effects import Done, Effect, Effects, Ending, Failed, Lane
from elastic_train.errors import Fenced
from elastic_train.storage.journal import Journal

log = logging.getLogger(__name__)
WAIT_S = 2.0  # how long a decision waits for its journal: recovery never waits for storage
LATE_S = 60.0  # when a flush that has no answer is said to be late


class JournalWriter:
    """Belongs to the deciding thread. One flush is under way at a time. `fenced` hears that a higher term has
    the journal.
    """

    def __init__(
        self,
        journal: Journal,
        effects: Effects,
        *,
        wait_s: float = WAIT_S,
        fenced: Callable[[Fenced], None] = lambda error: None,
    ) -> None:
        self._journal, self._effects, self._wait_s = journal, effects, wait_s
        self._fenced = fenced
        self._idle = threading.Event()
        self._idle.set()

    def flush(self) -> None:
        """Wait a moment until everything is durable. Where the flush before is stuck, nothing is waited for:
        what came since is flushed after it.
        """
        if not self._idle.is_set():
            return
        self._idle.clear()
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
