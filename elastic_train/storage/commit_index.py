"""Index of a commit log up to a slot, so that a start need not read all slots.

An index follows from slots that never change, so it doesn't matter who writes it. It names the hash of its
last slot's bytes, and a reader compares: one that doesn't fit, or can't be read, is passed over, and every
slot is read.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from elastic_train.errors import StorageError
from elastic_train.storage.record import CommitRecord, read_record
from elastic_train.storage.store import Store

log = logging.getLogger(__name__)
DIRECTORY = "commits-index"
FORMAT = "elastic_train.commit_index/1"
EVERY = 500
"""Slots from one index to the next."""
STAY = 2
"""Indexes that stay: a reader may be at the older one."""
_NAME = re.compile(rf"{DIRECTORY}/(\d{{8,}})\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """`records` are those up to `slot` that count and are not over: the newest fence, the newest commit, and
    the commits and pins that are kept.
    """

    slot: int = 0
    hash: str = ""  # of the slot's bytes
    records: tuple[CommitRecord, ...] = ()

    @property
    def term(self) -> int:
        return max((r.term for r in self.records if r.kind == "fence"), default=0)


def write_index(store: Store, index: Index, encode: Callable[[CommitRecord], bytes]) -> None:
    """Leave an index. That it is missing costs a start some time and nothing else."""
    records = [json.loads(encode(record)) for record in index.records]
    value = {"format": FORMAT, "slot": index.slot, "hash": index.hash, "records": records}
    try:
        store.write(_path(index.slot), json.dumps(value, separators=(",", ":")).encode())
        store.delete([_path(slot) for slot in _slots(store)[:-STAY]])
    except StorageError as error:
        log.warning("the commit log has no index at slot %d: %s", index.slot, error)


def newest_index(store: Store, path_of: Callable[[int], str]) -> Index:
    """The newest index that fits its log; an empty one where there is none."""
    for slot in reversed(_slots(store)):
        try:
            value = json.loads(store.read(_path(slot)))
            fits = xxhash.xxh3_128_hexdigest(store.read(path_of(slot))) == value["hash"]
            if value["format"] != FORMAT or value["slot"] != slot or not fits:
                raise ValueError("it is not of this log")
            records = tuple(
                read_record(json.dumps(record).encode(), slot=record["slot"], url=store.url)
                for record in value["records"]
            )
            return Index(slot=slot, hash=value["hash"], records=records)
        except (StorageError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            log.warning("%s/%s is passed over: %s", store.url, _path(slot), error)
    return Index()


def _slots(store: Store) -> list[int]:
    found = (_NAME.fullmatch(path) for path in store.list(DIRECTORY))
    return sorted(int(m[1]) for m in found if m)


def _path(slot: int) -> str:
    return f"{DIRECTORY}/{slot:08d}.json"
