"""Commit log: checkpoints, fences and prunes of a run, as slots that are created once.

One record per slot, `commits/00000042.json`, taken by a conditional create, so a slot has one writer for
ever. Each record names the slot before it and the hash of that record's bytes. A new controller writes a
*fence* with the highest term so far plus one. A writer takes the next slot only after it read all slots
before, so a controller that was paused finds the fence in the slot that it wanted: it cannot commit after its
successor began. Readers apply the same rule once more: a record whose term is not the one of the newest
fence before it is void.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace

import xxhash

from elastic_train.errors import AlreadyExists, Fenced, NoCheckpoint, StorageError, StorageNotFound
from elastic_train.storage import commit_index
from elastic_train.storage.commit_index import Index
from elastic_train.storage.record import FORMAT, CommitRecord, read_record
from elastic_train.storage.store import Store, read_taken

__all__ = ["DIRECTORY", "FORMAT", "CommitLog", "CommitRecord"]

DIRECTORY = "commits"
WINDOW = 64
"""Slots that are asked for side by side."""
_SLOT = re.compile(rf"{DIRECTORY}/([0-9]{{8}})\.json")


@dataclass(slots=True, kw_only=True)
class _Known:
    """What was read of the log so far; slots never change, so it only grows."""

    index: Index = field(default_factory=Index)  # what the slots before `records` come to
    records: list[CommitRecord] = field(default_factory=list)
    hash: str = ""  # of the last record's bytes
    term: int = 0  # of the newest fence

    @property
    def slots(self) -> int:
        return self.index.slot + len(self.records)

    def in_force(self) -> tuple[CommitRecord, ...]:
        return (*self.index.records, *_in_force(self.records, self.index.term))


class CommitLog:
    """The log of one run, in `store`, whose root is the run's directory. Safe to use from several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known = _Known()
        self._lock = threading.RLock()

    def begin_term(self, holder: str) -> int:
        """Write a fence: from its slot on, records of lower terms are void. Returns the new term."""
        with self._lock:
            while True:
                self._refresh()
                term = self._known.term + 1
                if self._claim(CommitRecord(kind="fence", holder=holder), term):
                    return term

    def append(self, record: CommitRecord, term: int) -> CommitRecord:
        """Put a record into the next slot for good, or raise Fenced. Returns it as it stands in the log.

        A commit that is kept stays its checkpoint's only one: an earlier try may have got through, though its
        answer did not.
        """
        with self._lock:
            while True:
                self._refresh()
                self._check(term)
                known = self._same_commit(record)
                if known is not None:
                    return known
                if self._claim(record, term):
                    return self._known.records[-1]

    def check(self, term: int) -> None:
        """Raise Fenced if a higher term began."""
        with self._lock:
            self._refresh()
            self._check(term)

    def newest_term(self) -> int:
        """The highest term that began; 0 for none."""
        with self._lock:
            self._refresh()
            return self._known.term

    def records(self) -> tuple[CommitRecord, ...]:
        """Every record that counts, void ones left out, in the order of the log."""
        with self._lock:
            self._refresh()
            return self._known.in_force()

    def valid(self) -> tuple[CommitRecord, ...]:
        """The commits that count and are kept, newest last."""
        return _kept(self.records(), "commit")

    def pins(self) -> tuple[CommitRecord, ...]:
        """What other runs read here: pins that count and weren't taken back."""
        return _kept(self.records(), "pin")

    @property
    def term(self) -> int:
        """The highest term that began, as of the last reading; 0 for none."""
        return self._known.term

    def _same_commit(self, record: CommitRecord) -> CommitRecord | None:
        if record.kind != "commit":
            return None
        what = (record.path, record.manifest_hash)
        commits = _kept(self._known.in_force(), "commit")
        return next((r for r in commits if (r.path, r.manifest_hash) == what), None)

    def _check(self, term: int) -> None:
        assert term <= self._known.term, f"term {term} never began"
        if term < self._known.term:
            raise Fenced(run=self._store.url, term=term, by_term=self._known.term)

    def _claim(self, record: CommitRecord, term: int) -> bool:
        """Try to take the slot after the known ones; False if it went to somebody else.

        StorageError where the newest known one is gone: nobody could read what came after a hole.
        """
        newest = _path(self._known.slots)
        if self._known.slots and not self._store.exists(newest):
            raise StorageError(
                path=f"{self._store.url}/{newest}",
                operation="append a record after",
                problem="it is gone: the run's directory was deleted or moved away, or its mount was.",
            )
        record = replace(
            record,
            term=term,
            slot=self._known.slots + 1,
            after=self._known.slots,
            after_hash=self._known.hash,
            nonce=secrets.token_hex(8),
        )
        data = _encode(record)
        try:
            self._store.create(_path(record.slot), data)
        except AlreadyExists:
            # Also what a try finds whose answer was lost: the nonce tells ours from another's.
            if read_taken(self._store, _path(record.slot)) != data:
                return False
        self._take(data)
        if record.slot % commit_index.EVERY == 0:
            self._leave_index()
        return True

    def _leave_index(self) -> None:
        """What the slots so far come to."""
        records = self._known.in_force()
        fences = [r for r in records if r.kind == "fence"][-1:]
        newest = [r for r in records if r.kind == "commit"][-1:]
        kept = {r.slot: r for r in (*fences, *newest, *_kept(records, "commit"), *_kept(records, "pin"))}
        index = Index(
            slot=self._known.slots, hash=self._known.hash, records=tuple(kept[slot] for slot in sorted(kept))
        )
        commit_index.write_index(self._store, index, _encode)

    def _refresh(self) -> None:
        if not self._known.slots:
            self._begin_at(commit_index.newest_index(self._store, _path))
        if not self._known.slots:
            found = (_SLOT.fullmatch(name) for name in self._store.list(DIRECTORY))
            slots = sorted(int(m[1]) for m in found if m and int(m[1]))
            absent = next((at for at, slot in enumerate(slots, 1) if slot != at), None)
            if absent is not None:
                there = f"slots up to {slots[-1]} of the commit log are there"
                raise self._damaged(f"{there}, and slot {absent} is missing")
            with ThreadPoolExecutor(8) as pool:
                for data in pool.map(lambda slot: self._store.read(_path(slot)), slots):
                    self._take(data)
        while True:
            try:
                data = self._store.read(_path(self._known.slots + 1))
            except StorageNotFound:
                return
            self._take(data)
            if self._known.index.slot and len(self._known.records) == 1:  # there may be many
                self._read_ahead()

    def _begin_at(self, index: Index) -> None:
        self._known = _Known(index=index, hash=index.hash, term=index.term)

    def _read_ahead(self) -> None:
        """Read the next slots side by side, as long as all of them are there."""
        with ThreadPoolExecutor(8) as pool:
            while True:
                first = self._known.slots + 1
                for data in pool.map(self._there, range(first, first + WINDOW)):
                    if data is None:
                        return
                    self._take(data)

    def _there(self, slot: int) -> bytes | None:
        try:
            return self._store.read(_path(slot))
        except StorageNotFound:
            return None

    def _take(self, data: bytes) -> None:
        slot = self._known.slots + 1
        record = self._decode(data, slot)
        if (record.slot, record.after, record.after_hash) != (slot, slot - 1, self._known.hash):
            raise self._damaged(f"slot {slot} of the commit log doesn't follow slot {slot - 1}")
        self._known.records.append(record)
        self._known.hash = xxhash.xxh3_128_hexdigest(data)
        if record.kind == "fence":
            self._known.term = max(self._known.term, record.term)

    def _decode(self, data: bytes, slot: int) -> CommitRecord:
        try:
            return read_record(data, slot=slot, url=self._store.url)
        except StorageError as error:
            raise self._damaged(f"slot {slot} of the commit log leads out of the run") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            said = f"{type(error).__name__}: {error!s:.200}"
            raise self._damaged(f"slot {slot} of the commit log can't be read ({said})") from error

    def _damaged(self, problem: str) -> NoCheckpoint:
        remedy = "Restore the directory `commits` from a copy, or start a run under another name."
        return NoCheckpoint(url=self._store.url, problem=f"{problem}. {remedy}")


def _in_force(records: Iterable[CommitRecord], term: int) -> Iterable[CommitRecord]:
    for record in records:
        if record.kind == "fence" and record.term > term:
            term = record.term
            yield record
        elif record.kind != "fence" and record.term == term:
            yield record


def _kept(records: Sequence[CommitRecord], kind: str) -> tuple[CommitRecord, ...]:
    removed = {slot for r in records if r.kind == "prune" for slot in r.removes}
    return tuple(r for r in records if r.kind == kind and r.slot not in removed)


def _path(slot: int) -> str:
    return f"{DIRECTORY}/{slot:08d}.json"


def _encode(record: CommitRecord) -> bytes:
    value = {"format": FORMAT, **asdict(record)}
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
