"""Read a journal from its beginning, or from the newest kept state on."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from elastic_train.errors import StorageError, StorageNotFound, StorageUnavailable
from elastic_train.storage.compacted_journal import read_history
from elastic_train.storage.journal_parts import (
    DIRECTORY,
    Part,
    in_force,
    read_parts,
    slot_of,
    slots,
)
from elastic_train.storage.store import Store

log = logging.getLogger(__name__)
FORMAT = "elastic_train.journal_state/1"
LOOKS = 8
"""How often the directory is listed anew while newer states come faster than they are read."""
_NAME = re.compile(rf"{DIRECTORY}/state-(\d{{8,}})\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Covering:
    """What all parts up to a slot lead to; `term` is that of the slot's part."""

    slot: int
    term: int
    said: dict[str, Any]


def covering_path(slot: int) -> str:
    return f"{DIRECTORY}/state-{slot:08d}.json"


def coverings(store: Store) -> list[int]:
    """Slots up to which there is a state, ascending."""
    found = (_NAME.fullmatch(path) for path in store.list(DIRECTORY))
    return sorted(int(m[1]) for m in found if m)


def encode_covering(covering: Covering) -> bytes:
    value = {"format": FORMAT, "slot": covering.slot, "term": covering.term, "said": covering.said}
    return json.dumps(value, separators=(",", ":")).encode()


def newest_covering(store: Store) -> Covering | None:
    """The newest state that can be read; the parts that it covers are there for who can't use any."""
    found, looks = coverings(store), 1
    while found:
        slot = found.pop()
        try:
            value = json.loads(store.read(covering_path(slot)))
            if value["format"] == FORMAT:
                return Covering(slot=slot, term=int(value["term"]), said=dict(value["said"]))
        except StorageNotFound as error:  # a newer one came meanwhile
            if looks == LOOKS:
                problem = (
                    "the directory lists it and it is not there: this machine sees the storage as it was."
                )
                path = f"{store.url}/{covering_path(slot)}"
                raise StorageUnavailable(path=path, operation="read", problem=problem) from error
            found, looks = coverings(store), looks + 1
        except (ValueError, KeyError, TypeError) as error:
            log.warning("%s/%s can't be read: %s", store.url, covering_path(slot), error)
    return None


def parts_after(store: Store, after: int = 0, *, term: int = 0) -> Iterator[Part]:
    """Every part after a slot that counts, in order; `term` is that of the slot's part."""
    return in_force(_followed(store, after), term)


def read_journal(store: Store, after: str = "") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """All parts in order, as (name, records); `after` skips the parts up to that name."""
    for part in parts_after(store, slot_of(after) or 0):
        yield part.name, part.records


def _followed(store: Store, after: int) -> Iterator[Part]:
    while True:
        began = after
        try:
            for part in _there(store, after):
                after = part.slot
                yield part
            return
        except StorageNotFound:  # compacted between listing and reading: it is in the history now
            if after == began:
                raise


def _there(store: Store, after: int) -> Iterator[Part]:
    """What is after a slot now: compacted parts, then those that are not."""
    hot = [slot for slot in slots(store) if slot > after]
    if hot and hot != list(range(after + 1, hot[-1] + 1)):
        for part in read_history(store, after):
            after = part.slot
            yield part
        hot = [slot for slot in hot if slot > after]
        missing = next((number for number, slot in enumerate(hot, after + 1) if slot != number), None)
        if missing is not None:
            raise StorageError(
                path=f"{store.url}/{DIRECTORY}",
                operation="read",
                problem=f"slot {missing} is missing, and {hot[-1]} is there. Restore it from a copy, or "
                "start a run under another name.",
            )
    yield from read_parts(store, hot)
