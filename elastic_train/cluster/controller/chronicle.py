"""Write journal records, and from time to time the state that they lead to; read both at a start.

A start folds what came after the newest state, whatever the age of the run. A state that this release can't
read is passed over: then everything is folded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from elastic_train.cluster.controller.fold_records import fold_records
from elastic_train.control.journal_codec import decode_state, encode_state
from elastic_train.control.policy import Policy
from elastic_train.control.states import State
from elastic_train.observe.journal_records import Record, from_json, to_json
from elastic_train.observe.run_summary import RunSummary, encode_summary, summary_of
from elastic_train.storage.journal import Journal
from elastic_train.storage.journal_parts import Part
from elastic_train.storage.journal_reading import parts_after
from elastic_train.storage.store import Store

log = logging.getLogger(__name__)
RECORDS = 4000
"""Records from one kept state to the next: about 2 MB of journal, folded in half a second."""
FEWEST = 50
"""Records that a state is worth: while one is on its way, the parts before it are still counted."""
PARTS = 500
"""Parts from one kept state to the next, where each holds few records: each is a request to read."""


class Chronicle:
    """Belongs to the deciding thread. `tell` hears the summary after each record."""

    def __init__(
        self,
        store: Store,
        journal: Journal,
        policy: Policy,
        *,
        every: int = RECORDS,
        tell: Callable[[RunSummary], None] = lambda summary: None,
    ) -> None:
        self._tell = tell
        self._store, self._journal, self._policy, self._every = store, journal, policy, every
        self._summary = RunSummary()
        self._since = 0  # records since a state was kept

    @property
    def wall_s(self) -> float:
        """Wall seconds of the newest record, as whoever wrote it had them; 0 before there is one."""
        last = self._summary.last
        return last.seconds if last is not None else 0.0

    def begin(self) -> State:
        """The state that everything before this term leads to; the journal is this term's from here on."""
        past = self._journal.begin()
        state, parts = State(), past.parts
        if past.covering is not None:
            try:
                state, self._summary = _understood(past.covering.said)
            except (KeyError, TypeError, ValueError, AssertionError) as error:
                log.warning(
                    "the state at slot %d can't be read, so all is folded: %r", past.covering.slot, error
                )
                parts = [part for part in parts_after(self._store) if part.slot < past.end]
        for part in parts:
            state = self._fold(part, state)
        return state

    def note(self, record: Record, state: State) -> None:
        """Write down a record and the state after it."""
        self._journal.append(to_json(record))
        self._summary.add(record)
        self._tell(self._summary)
        self._since += 1
        if self._since >= self._every or (self._since >= FEWEST and self._journal.uncovered >= PARTS):
            self._journal.keep({"state": encode_state(state), "summary": encode_summary(self._summary)})
            self._since = 0

    def _fold(self, part: Part, state: State) -> State:
        records = [from_json(line) for line in part.records]
        for record in records:
            self._summary.add(record)
        self._since += len(records)
        return fold_records(records, self._policy, state)


def _understood(said: Mapping[str, Any]) -> tuple[State, RunSummary]:
    return decode_state(said["state"]), summary_of((), said["summary"])
