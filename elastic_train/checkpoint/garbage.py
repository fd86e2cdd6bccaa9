"""Garbage collection of a run: files that two complete listings show to be unreferenced.

Not to see something is no evidence that it isn't there. So what a kept checkpoint needs is read from its own
manifest, by its name and against its hash in the log, never concluded from a listing. What another run pinned
is needed like what is kept. A look in which anything fails raises, and nothing is deleted.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from elastic_train.checkpoint.checksums import digest
from elastic_train.checkpoint.commit import MANIFEST
from elastic_train.checkpoint.manifest import Manifest
from elastic_train.errors import CheckpointError, ChecksumMismatch, StorageError
from elastic_train.storage.commit_log import CommitLog, CommitRecord
from elastic_train.storage.store import UNPUBLISHED, Store

CHECKPOINTS = "checkpoints"
SWEPT = ("", "commits", "journal", "history", "output")
"""Directories of a run, "" for its own, in which no file is written piece by piece."""
_ATTEMPT = re.compile(r"step-(\d{10,})\.g(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What has to stay beside what is kept: slots after the one that was `known` when `keep` was decided,
    None for all; attempts in flight (generation, step); those of the generation that was `writing` then,
    beyond the newest commit, because its writers may not have reported yet; and those of later generations.
    """

    keep: Collection[int]
    known: int | None = None
    in_flight: Collection[tuple[int, int]] = ()
    writing: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """`slots` of commits to go; directories to go, each with the files in it that others need; files that a
    killed writer of the log left.
    """

    slots: tuple[int, ...]
    gone: Mapping[str, frozenset[str]]
    left: frozenset[str]

    def both(self, other: Look) -> Look:
        """What two looks agree may go, and all that either saw to be needed."""
        gone = {d: needed | other.gone[d] for d, needed in self.gone.items() if d in other.gone}
        return Look(slots=self.slots, gone=gone, left=self.left & other.left)


def attempt_path(*, step: int, generation: int) -> str:
    """The directory of one attempt at a checkpoint; a step saved by another generation is another attempt."""
    return f"{CHECKPOINTS}/step-{step:010d}.g{generation}"


def attempts(store: Store) -> set[str]:
    """Directories of attempts, those with nothing but an unfinished write included."""
    return _attempts([*store.list(CHECKPOINTS), *store.unfinished(CHECKPOINTS)])


def leftovers(store: Store) -> list[str]:
    """What killed writers left beside the attempts, in directories whose files are written in one call: such
    a writer, if it lives after all, begins again when its file is gone.
    """
    return _leftovers(store.unfinished())


def _attempts(paths: Iterable[str]) -> set[str]:
    names = {p.split("/")[1] for p in paths if p.startswith(f"{CHECKPOINTS}/")}
    return {f"{CHECKPOINTS}/{n}" for n in names if _ATTEMPT.fullmatch(n)}


def _leftovers(paths: Iterable[str]) -> list[str]:
    found = [path.rpartition("/") for path in paths]
    return [
        directory + slash + name
        for directory, slash, name in found
        if directory in SWEPT and name.startswith(UNPUBLISHED)
    ]


def look(store: Store, log: CommitLog, wanted: Wanted) -> Look:
    """One look at everything; StorageError, with the reason, where it isn't complete."""
    try:
        # Before the log is read: what is committed later isn't in it.
        unfinished = store.unfinished()
        there = _attempts([*store.list(CHECKPOINTS), *unfinished])
        left = frozenset(_leftovers(unfinished))
    except StorageError as error:
        raise _incomplete(store, error) from error
    kept = log.valid()
    decided = [r.slot for r in kept[:-1] if wanted.known is None or r.slot <= wanted.known]
    slots = tuple(slot for slot in decided if slot not in wanted.keep)
    committed = {r.path: r for r in kept if r.slot not in slots}
    pinned = {r.path: r for r in log.pins()}
    committed |= {path: record for path, record in pinned.items() if path not in committed}
    stay = {*committed, *(attempt_path(step=s, generation=g) for g, s in wanted.in_flight)}
    gone = {d for d in there - stay if not (kept and _beyond(d, kept[-1], wanted.writing))}
    if not gone:
        return Look(slots=slots, gone={}, left=left)
    try:
        needed = {f for record in committed.values() for f in files_of(store, record)}
        for directory in sorted((there | stay) - gone - committed.keys()):
            needed.update(_files_of_attempt(store, directory))
    except (StorageError, CheckpointError) as error:
        raise _incomplete(store, error) from error
    return Look(
        slots=slots,
        gone={d: frozenset(f for f in needed if f.startswith(d + "/")) for d in sorted(gone)},
        left=left,
    )


def delete(
    store: Store,
    log: CommitLog,
    term: int,
    doomed: Look,
    told: Callable[[str], None] = lambda directory: None,
) -> None:
    """Delete what two looks agreed on; Fenced as soon as another controller owns the run."""
    for directory, needed in doomed.gone.items():
        log.check(term)
        if needed:
            store.delete([f for f in store.list(directory) if f not in needed])
        else:
            store.delete_tree(directory)
        told(directory)
    store.discard(sorted(doomed.left))


def files_of(store: Store, record: CommitRecord) -> set[str]:
    """The files in the run that a committed checkpoint names, as paths in its store."""
    url = f"{store.url}/{record.path}"
    data = store.read(f"{record.path}/{MANIFEST}")
    if digest(data) != record.manifest_hash:
        raise ChecksumMismatch(url=url, problem=f"{MANIFEST} isn't the one that was committed.")
    return set(_inside(store, record.path, Manifest.decode(data, url=url)))


def _files_of_attempt(store: Store, directory: str) -> Iterator[str]:
    """Files that the parts of a checkpoint name which isn't committed yet."""
    for part in store.list(directory):
        if part.endswith(".parquet"):
            manifest = Manifest.decode(store.read(part), url=f"{store.url}/{directory}")
            yield from _inside(store, directory, manifest)


def _inside(store: Store, directory: str, manifest: Manifest) -> Iterator[str]:
    for file in manifest.distinct("file"):
        if file.startswith(f"{store.url}/"):
            yield file[len(store.url) + 1 :]
        elif "://" not in file and not file.startswith("/"):
            yield posixpath.normpath(f"{directory}/{file}")


def _beyond(path: str, newest: CommitRecord, writing: int | None) -> bool:
    """Whether an attempt may still be on its way: of a later step by the generation that was writing, or by
    one that began since."""
    found = _ATTEMPT.fullmatch(path.rpartition("/")[2])
    assert found is not None
    step, generation = int(found[1]), int(found[2])
    return writing is not None and (generation > writing or (generation == writing and step > newest.step))


def _incomplete(store: Store, error: StorageError | CheckpointError) -> StorageError:
    return StorageError(
        path=store.url,
        operation="delete old checkpoints of",
        problem=f"not all that is still needed can be seen, so nothing was deleted: {error}",
    )
