"""Read a run's journal from storage, from its newest kept state on. No cluster is needed."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from elastic_train.observe.journal_records import Record, from_json
from elastic_train.observe.run_summary import RunSummary, summary_of
from elastic_train.storage.journal_parts import part_path
from elastic_train.storage.journal_reading import newest_covering, read_journal
from elastic_train.storage.store import Store

log = logging.getLogger(__name__)


def covered(store: Store) -> tuple[RunSummary, str]:
    """The summary of what the newest state covers, and the last part of that; "" where there is none."""
    found = newest_covering(store)
    if found is not None:
        try:
            return summary_of((), found.said["summary"]), part_path(found.slot)
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            log.warning("the summary at slot %d can't be read, so all is read: %r", found.slot, error)
    return RunSummary(), ""


def summary(store: Store) -> RunSummary:
    """Where the run stands. `last` is None where there is no journal."""
    reading = Following(store)
    reading.look()
    return reading.told


class Following:
    """A run's summary, and what came since it was last looked at: one part of the journal at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.told, self._after = covered(store)

    def look(self) -> None:
        """Read on. After a StorageError what was read counts, and the next look goes on from there."""
        for name, part in read_journal(self._store, self._after):
            for line in part:
                self.told.add(from_json(line))
            self._after = name


def records(store: Store, after: str = "") -> Iterator[Record]:
    """Every record after a part, one part at a time."""
    for _, part in read_journal(store, after):
        yield from map(from_json, part)
