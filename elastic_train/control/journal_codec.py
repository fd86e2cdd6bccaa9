"""Events as JSON-able dicts and back, exactly, and the fold of a journal.

An event is written as its fields and its type's name. Reading follows the field types of the event's class;
unknown fields are ignored and missing ones take their defaults, so that a release reads the journals of its
neighbours. Numbers that JSON does not have are written as strings.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from elastic_train.control import events
from elastic_train.control.events import Event
from elastic_train.control.policy import Policy
from elastic_train.control.states import Outcome, State
from elastic_train.control.transition import transition

Json = Mapping[str, Any]
EVENTS: Mapping[str, type] = {kind.__name__: kind for kind in get_args(events.Event)}


def encode(event: Event) -> dict[str, Any]:
    """An event as a dict that JSON can hold."""
    return {"type": type(event).__name__, **_fields(event)}


def decode(record: Json) -> Event:
    """The event that was encoded. Raises KeyError for a type that this release does not know."""
    return _reader(EVENTS[record["type"]])(record)


def changed(before: State, outcome: Outcome) -> bool:
    """Whether an event has to be kept: replaying without the others gives the same state."""
    return outcome.state is not before or bool(outcome.commands)


def fold(journal: Iterable[Event], policy: Policy, state: State | None = None) -> State:
    """The state that the events lead to."""
    state = state if state is not None else State()
    for event in journal:
        state = transition(state, event, policy).state
    return state


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return _fields(value)
    if isinstance(value, tuple):
        return [_plain(entry) for entry in cast("tuple[Any, ...]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """How to read a value of a field's type."""
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _dataclass_reader(kind)
    if kind is float:
        return float
    if origin in (Union, types.UnionType):
        (reader,) = (_reader(choice) for choice in inner if choice is not type(None))
        return lambda value: None if value is None else reader(value)
    if origin is tuple and inner[-1] is Ellipsis:
        each = _reader(inner[0])
        return lambda value: tuple(each(entry) for entry in value)
    if origin is tuple:
        readers = tuple(_reader(entry) for entry in inner)
        return lambda value: tuple(read(entry) for read, entry in zip(readers, value, strict=True))
    assert origin is Literal or kind in (int, str, bool), kind
    return lambda value: value


def _dataclass_reader(kind: Any) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    readers = {f.name: _reader(hints[f.name]) for f in fields(kind)}
    required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}

    def read(record: Json) -> Any:
        return kind(
            **{
                name: each(record[name])
                for name, each in readers.items()
                if name in record or name in required
            }
        )

    return read
