"""Parts of the journal: names, encoding, and reading them in order.

A part is a file of JSON lines. Its first line says which term wrote it, and which writer of that term; the
others are records. Its number is a slot that is taken once: parts of all terms are one sequence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from elastic_train.errors import FormatUnsupported, StorageError
from elastic_train.storage.store import Store, read_taken

DIRECTORY = "journal"
FORMAT = "elastic_train.journal/2"
AT_ONCE = 16
"""Parts that are read at the same time: one after the other, each would cost a request's whole latency."""
WINDOW = 64
"""Parts that are held at once."""
_NAME = re.compile(rf"{DIRECTORY}/(\d{{8,}})\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One slot. `writer` is unique to one writer of the term."""

    slot: int
    term: int
    writer: str
    lines: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return part_path(self.slot)

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


def part_path(slot: int) -> str:
    return f"{DIRECTORY}/{slot:08d}.jsonl"


def slot_of(path: str) -> int | None:
    """The slot of a part's path; None for any other file."""
    found = _NAME.fullmatch(path)
    return int(found[1]) if found else None


def slots(store: Store) -> list[int]:
    """Slots that are taken, ascending."""
    return sorted(slot for path in store.list(DIRECTORY) if (slot := slot_of(path)) is not None)


def encode(part: Part) -> bytes:
    header = json.dumps({"format": FORMAT, "term": part.term, "writer": part.writer}, separators=(",", ":"))
    return "".join(f"{line}\n" for line in (header, *part.lines)).encode()


def read_part(store: Store, slot: int, *, taken: bool = False) -> Part:
    """The part of a slot; `taken`: of which a creation said that it is there."""
    path = part_path(slot)
    data = read_taken(store, path) if taken else store.read(path)
    try:
        header, *lines = data.decode().splitlines()
        said = json.loads(header)
        if said["format"] != FORMAT:
            problem = (
                f"{path} has the format {said['format']!r}, which this release doesn't know. Upgrade it."
            )
            raise FormatUnsupported(url=store.url, problem=problem)
        return Part(slot=slot, term=int(said["term"]), writer=str(said["writer"]), lines=tuple(lines))
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            path=f"{store.url}/{path}",
            operation="understand",
            problem=f"it is no part of a journal ({error}). Restore the directory `{DIRECTORY}` from a copy, "
            "or start a run under another name.",
        ) from error


def read_parts(store: Store, wanted: Sequence[int]) -> Iterator[Part]:
    """The parts of slots, in that order, several of them read at the same time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for start in range(0, len(wanted), WINDOW):
            yield from pool.map(lambda slot: read_part(store, slot), wanted[start : start + WINDOW])


def in_force(parts: Iterable[Part], term: int = 0) -> Iterator[Part]:
    """Parts without those that a term wrote after a higher one began."""
    for part in parts:
        if part.term >= term:
            term = part.term
            yield part
