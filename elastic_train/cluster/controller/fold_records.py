"""Fold journal records into a state, where they were decided under other options or by another release too.

A fold decides again what was decided. A run that is submitted with other options would decide otherwise, and
what was heard afterwards would mean something else: another worker of the same name, another generation. From
the first record on that says another phase, group or order than the fold, only what holds under any options
is taken, until the next term begins: generations and workers that were named, steps, checkpoints. That term
begins from storage, as its processes are not those that this state knows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from elastic_train.control.adoption import afresh
from elastic_train.control.events import (
    CheckpointCommitted,
    CheckpointRejected,
    Event,
    StepCommitted,
    TermBegan,
    WorkerReady,
)
from elastic_train.control.membership import number_of
from elastic_train.control.policy import Policy
from elastic_train.control.states import Facts, Outcome, State, Waiting
from elastic_train.control.transition import transition
from elastic_train.observe.journal_records import FormedGroup, Record, record
from elastic_train.recovery.lineage import began

log = logging.getLogger(__name__)


def fold_records(records: Iterable[Record], policy: Policy, state: State) -> State:
    """The state that the records lead to."""
    for line in records:
        state = _after(state, line, policy)
    return state


def _after(state: State, line: Record, policy: Policy) -> State:
    if _parted(state) and not isinstance(line.event, TermBegan):
        return _noted(state, line, policy)
    try:
        outcome = transition(state, line.event, policy)
    except AssertionError:  # of an event that can't come there
        outcome = None
    if outcome is not None and _as_written(line, outcome):
        return outcome.state
    log.warning("from record %d on, the journal was written under other options or releases", line.seq)
    facts = replace(afresh(state.facts), term=0)
    return _noted(State(facts=facts, phase=Waiting(since=state.now), now=state.now), line, policy)


def _parted(state: State) -> bool:
    """Whether the fold went another way than the run: no term is known, and yet something happened."""
    return state.facts.term == 0 and state != State()


def _as_written(line: Record, outcome: Outcome) -> bool:
    again = record(line.seq, line.wall, line.event, outcome)
    return (again.phase, again.commands, again.formed) == (line.phase, line.commands, line.formed)


def _noted(state: State, line: Record, policy: Policy) -> State:
    facts = state.facts
    match line.event:
        case CheckpointCommitted() | CheckpointRejected():
            facts = transition(state, line.event, policy).state.facts
        case other:
            facts = _with_names(facts, other)
    if line.formed is not None:
        facts = _with_group(facts, line.formed)
    return State(facts=facts, phase=Waiting(since=line.event.at), now=line.event.at)


def _with_names(facts: Facts, event: Event) -> Facts:
    match event:
        case WorkerReady(worker=worker):
            born = max(facts.membership.born, number_of(worker))
            return replace(facts, membership=replace(facts.membership, born=born))
        case StepCommitted(generation=generation, step=step) if generation == facts.lineage.generation:
            return replace(facts, lineage=replace(facts.lineage, step=step))
        case _:
            return facts


def _with_group(facts: Facts, formed: FormedGroup) -> Facts:
    chain = began(facts.lineage.chain, formed.generation, formed.step)
    lineage = replace(facts.lineage, generation=formed.generation, chain=chain, step=formed.step)
    return replace(facts, lineage=lineage)
