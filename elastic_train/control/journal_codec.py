"""Encode events and states as JSON-able dicts, decode them exactly, and fold a journal.

An event is written as its fields and its type's name (dataclass_json.py). A state is what the fold of all
events up to some place gives, so that a journal need not be folded from its beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from operator import itemgetter
from typing import Any, get_args, get_type_hints

from elastic_train.control import events
from elastic_train.control.dataclass_json import NAME, Json, plain, reader
from elastic_train.control.events import Event
from elastic_train.control.policy import Policy
from elastic_train.control.states import Facts, Outcome, Pausing, Settling, State
from elastic_train.control.transition import transition

EVENTS: Mapping[str, type] = {kind.__name__: kind for kind in get_args(events.Event)}

GROUPS: Mapping[str, type] = {
    name: kind
    for name, kind in get_type_hints(Facts).items()
    if isinstance(kind, type) and is_dataclass(kind)
}
FLAT: Mapping[tuple[str, str], str] = {
    ("lineage", "chain"): "lineage",
    ("saves", "asked"): "save_asked",
    ("failures", "count"): "failures",
    ("failures", "ever"): "failures_ever",
    ("failures", "repeated"): "failed_at",
    ("failures", "last_step"): "failed_step",
    ("failures", "not_finite"): "unfit",
    ("measured", "saving_s"): "saving",
    ("measured", "moving_bytes"): "moving",
    ("measured", "peer_memory"): "held",
}
"""Fields of facts that had another name before facts had groups, by group."""


def encode(event: Event) -> dict[str, Any]:
    """An event as a dict that JSON can hold."""
    return {NAME: type(event).__name__, **plain(event)}


def decode(record: Json) -> Event:
    """The event that was encoded. Raises KeyError for a type that this release does not know."""
    return reader(EVENTS[record[NAME]])(record)


def encode_state(state: State) -> dict[str, Any]:
    """A state as a dict that JSON can hold."""
    return plain(state, named=True)


def decode_state(record: Json) -> State:
    """The state that was encoded. Raises KeyError, TypeError or ValueError for one that this release does not
    know.
    """
    facts = record["facts"]
    if "membership" not in facts:
        record = {**record, "facts": _grouped(facts)}
    return _sorted(reader(State)(record))


def _sorted(state: State) -> State:
    """What is kept in the order of workers' names, which earlier releases kept as it had come."""
    facts, phase = state.facts, state.phase
    survived = replace(
        facts.survived,
        local_states=tuple(sorted(facts.survived.local_states, key=itemgetter(0))),
        logs=tuple(sorted(facts.survived.logs, key=itemgetter(0))),
    )
    match phase:
        case Settling():
            phase = replace(phase, pending=tuple(sorted(phase.pending)))
        case Pausing():
            phase = replace(phase, settled=tuple(sorted(phase.settled)))
        case _:
            pass
    return replace(state, facts=replace(facts, survived=survived), phase=phase)


def _grouped(flat: Json) -> Json:
    """The facts of a state that a release before their groups wrote."""
    facts = {field.name: flat[field.name] for field in fields(Facts) if field.name in flat}
    for group, kind in GROUPS.items():
        old = {field.name: FLAT.get((group, field.name), field.name) for field in fields(kind)}
        facts[group] = {name: flat[before] for name, before in old.items() if before in flat}
    return facts


def changed(before: State, outcome: Outcome) -> bool:
    """Whether an event has to be kept: replaying without the others gives the same state."""
    return outcome.state is not before or bool(outcome.commands)


def fold(journal: Iterable[Event], policy: Policy, state: State | None = None) -> State:
    """The state that the events lead to."""
    state = state if state is not None else State()
    for event in journal:
        state = transition(state, event, policy).state
    return state
