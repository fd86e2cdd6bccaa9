"""Record of the commit log, with its types validated."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Literal

from elastic_train.errors import FormatUnsupported
from elastic_train.storage.store import check_path

FORMAT = "elastic_train.commit/1"
KINDS = ("fence", "commit", "prune", "pin")
MOST = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """One slot of the log. `slot`, `term`, `after` and `after_hash` are filled in by the log.

    A commit makes the checkpoint at `path` visible. A prune says that the checkpoints of the slots in
    `removes` are no longer kept: their bytes may be gone. A pin says that another run, its `holder`, reads
    the files of the commit at `path`: they stay until a prune removes the pin's own slot.
    """

    kind: Literal["fence", "commit", "prune", "pin"]
    slot: int = 0
    term: int = 0
    after: int = 0  # the slot before, 0 for none
    after_hash: str = ""
    holder: str = ""  # of a fence; of a pin the run that reads
    nonce: str = ""
    step: int = 0
    generation: int = 0
    path: str = ""  # of the checkpoint's directory, relative to the run
    manifest_hash: str = ""
    lineage: tuple[tuple[int, int], ...] = ()  # (generation, step it started from), oldest first
    metrics: tuple[tuple[str, float], ...] = ()
    removes: tuple[int, ...] = ()


def read_record(data: bytes, *, slot: int, url: str) -> CommitRecord:
    """The record in a slot's bytes.

    FormatUnsupported for a later release's, StorageError for a path that leads out of the run, ValueError,
    TypeError, KeyError, AttributeError or RecursionError for what no release wrote.
    """
    value: dict[str, Any] = json.loads(data)
    if value.pop("format") != FORMAT:
        problem = f"slot {slot} of the commit log has a format newer than this release. Upgrade it."
        raise FormatUnsupported(url=url, problem=problem)
    absent = {f.name for f in fields(CommitRecord)} - value.keys()
    if absent:
        raise KeyError(", ".join(sorted(absent)))
    value["lineage"] = tuple((_number(g), _number(s)) for g, s in value["lineage"])
    value["metrics"] = tuple((_text(k), _real(v)) for k, v in value["metrics"])
    value["removes"] = tuple(_number(n) for n in value["removes"])
    for name in ("slot", "term", "after", "step", "generation"):
        _number(value[name])
    for name in ("after_hash", "holder", "nonce", "path", "manifest_hash"):
        _text(value[name])
    record = CommitRecord(**value)
    if record.kind not in KINDS:
        raise ValueError(f"a record of the kind {record.kind!r:.40}")
    if record.kind in ("commit", "pin"):
        check_path(record.path)
    return record


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST:
        raise TypeError(f"{value!r:.40} where a number of 63 bits belongs")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} where text belongs")
    value.encode()  # UnicodeEncodeError, a ValueError, where it is no text that a file can hold
    return value


def _real(value: Any) -> float:
    if type(value) not in (int, float) or (isinstance(value, int) and abs(value) > MOST):
        raise TypeError(f"{value!r:.40} where a number belongs")
    return value
