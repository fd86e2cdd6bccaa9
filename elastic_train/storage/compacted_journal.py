"""Compacted journal: old parts, many in one Parquet file.

Nothing that runs reads them: a state covers them. A file's name says which slots are in it, and what is in a
slot never changes, so it doesn't matter who compacts them, or whether two do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_train.errors import AlreadyExists, StorageError
from elastic_train.storage.journal_parts import Part
from elastic_train.storage.store import Store

DIRECTORY = "history"
SCHEMA = pa.schema(
    [("slot", pa.int64()), ("term", pa.int64()), ("writer", pa.string()), ("line", pa.string())]
)
_NAME = re.compile(rf"{DIRECTORY}/(\d{{8,}})-(\d{{8,}})\.parquet")


def spans(store: Store) -> list[tuple[int, int]]:
    """First and last slot of each file, ascending."""
    found = (_NAME.fullmatch(path) for path in store.list(DIRECTORY))
    return sorted((int(m[1]), int(m[2])) for m in found if m)


def write_history(store: Store, first: int, last: int, parts: Sequence[Part]) -> None:
    """Keep what counts of the parts from a slot to another. Of two writers of the same either's file does."""
    rows = [(part, line) for part in parts for line in (part.lines or (None,))]
    table = pa.table(
        {
            "slot": [part.slot for part, _ in rows],
            "term": [part.term for part, _ in rows],
            "writer": [part.writer for part, _ in rows],
            "line": [line for _, line in rows],
        },
        schema=SCHEMA,
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    try:
        store.create(_path(first, last), memoryview(sink.getvalue()))
    except AlreadyExists:
        return


def read_history(store: Store, after: int) -> Iterator[Part]:
    """Parts after a slot, in order, one file at a time."""
    for first, last in spans(store):
        if last <= after:
            continue
        for part in _parts(store, _path(first, last)):
            if part.slot > after:
                yield part
        after = last


def _parts(store: Store, path: str) -> Iterator[Part]:
    try:
        rows = pq.read_table(pa.BufferReader(store.read(path)), schema=SCHEMA).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        problem = f"it is no history of a run ({error})."
        raise StorageError(path=f"{store.url}/{path}", operation="understand", problem=problem) from error
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or rows[end]["slot"] != rows[start]["slot"]:
            lines = tuple(row["line"] for row in rows[start:end] if row["line"] is not None)
            head = rows[start]
            yield Part(slot=head["slot"], term=head["term"], writer=head["writer"], lines=lines)
            start = end


def _path(first: int, last: int) -> str:
    return f"{DIRECTORY}/{first:08d}-{last:08d}.parquet"
