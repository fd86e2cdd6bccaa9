"""Begin effects that end in events, and turn an effect's failure into a cause."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterable
from typing import TypeVar

from elastic_train.cluster.controller.effects import (
    Done,
    Effect,
    Effects,
    Ending,
    Failed,
    Lane,
    Late,
    Refused,
)
from elastic_train.cluster.error_causes import cause_of
from elastic_train.control.events import Cause, Event
from elastic_train.errors import InfrastructureError

log = logging.getLogger(__name__)
T = TypeVar("T")


def why_not(what: str, ending: Refused | Failed | Late, *, phase: str = "forming", node: str = "") -> Cause:
    """The cause that the end of an effect is."""
    match ending:
        case Failed(error=error):
            return cause_of(error, phase=phase, node=node)
        case Late(within_s=within_s):
            detail = f"{what} took longer than {within_s:.0f} s"
            return Cause(kind="silence", detail=detail, phase=phase, node=node)
        case Refused(why=why):
            return Cause(kind="preemption", detail=f"{what}: {why}", phase=phase, node=node)


def begin_events(
    effects: Effects,
    name: str,
    lane: Lane,
    within_s: float,
    call: Callable[[], Iterable[Event]],
    *,
    post: Callable[[Event], None],
    otherwise: Callable[[Cause], Event],
) -> None:
    """An effect that ends in the events that it returns, or in the one that says why there are none."""

    def ended(ending: Ending[Iterable[Event]]) -> None:
        if isinstance(ending, Done):
            for event in ending.value:
                post(event)
        else:
            post(otherwise(why_not(name, ending)))

    effects.begin(Effect(name=name, lane=lane, within_s=within_s, call=call, ended=ended))


def begin_aside(
    effects: Effects, name: str, call: Callable[[], object], *, within_s: float, lane: Lane = Lane.FORMING
) -> None:
    """Something that helps and that nothing waits for: what goes wrong is said, and the run goes on."""

    def ended(ending: Ending[object]) -> None:
        if not isinstance(ending, Done):
            log.warning("%s did not come about: %s", name, why_not(name, ending, phase="").detail)

    effects.begin(Effect(name=name, lane=lane, within_s=within_s, call=call, ended=ended))


def awaited(effects: Effects, name: str, lane: Lane, within_s: float, call: Callable[[], T]) -> T:
    """What an effect returns, for a thread that has nothing else to do. Raises what it raised, or
    InfrastructureError where it did not end in time.
    """
    ended: queue.SimpleQueue[Ending[T]] = queue.SimpleQueue()
    effects.begin(Effect(name=name, lane=lane, within_s=within_s, call=call, ended=ended.put))
    match ended.get():
        case Done(value=value):
            return value
        case Failed(error=error):
            raise error
        case ending:
            raise InfrastructureError(cause=why_not(name, ending).detail)
