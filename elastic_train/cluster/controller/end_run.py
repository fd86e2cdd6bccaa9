"""The end of a run: everything that it has outside of its processes is put back, side by side, in bounded
time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from elastic_train.cluster.controller.effect_endings import why_not
from elastic_train.cluster.controller.effects import Done, Effect, Effects, Ending, Lane

log = logging.getLogger(__name__)
END_S = 6.0
"""What the end may take. A driver that was interrupted twice waits for less."""


def finish(effects: Effects, **calls: Callable[[], object] | None) -> None:
    """Make all of these calls, named by what they put back, and wait for them. What does not work is said: a
    sweep or the next start of the run finds it.

    What the last commit had deleted is waited for, too: who is killed in it leaves an unfinished file.
    """
    given = {name: call for name, call in calls.items() if call is not None}
    given["storage"] = lambda: effects.idle(Lane.STORAGE, END_S)
    left = threading.Semaphore(0)

    def begin(name: str, call: Callable[[], object]) -> None:
        def ended(ending: Ending[object]) -> None:
            if not isinstance(ending, Done):
                log.warning("at the end of the run: %s", why_not(name, ending).detail)
            left.release()

        effects.begin(Effect(name=name, lane=Lane.URGENT, within_s=END_S, call=call, ended=ended))

    for name, call in given.items():
        begin(name, call)
    for _ in given:
        left.acquire()
