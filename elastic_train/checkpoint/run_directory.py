"""The directory of a run: its configuration, its commits, and what may be deleted."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from elastic_train.checkpoint.commit import MANIFEST, Assembled
from elastic_train.checkpoint.document import Json, decode, encode
from elastic_train.checkpoint.manifest import Manifest
from elastic_train.errors import AlreadyExists, CheckpointDeleted, ConfigError, NoCheckpoint, StorageNotFound
from elastic_train.recovery.evidence import Stored
from elastic_train.recovery.lineage import alive
from elastic_train.storage.commit_log import CommitLog, CommitRecord
from elastic_train.storage.store import Store

CONFIG = "run.json"
CHECKPOINTS = "checkpoints"
_ATTEMPT = re.compile(r"step-(\d{10,})\.g(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What a prune did: slots no longer kept, and directories of which something was deleted."""

    slots: tuple[int, ...]
    directories: tuple[str, ...]


def attempt_path(*, step: int, generation: int) -> str:
    """The directory of one attempt at a checkpoint; a step saved by another generation is another attempt."""
    return f"{CHECKPOINTS}/step-{step:010d}.g{generation}"


class RunDirectory:
    """A run in `store`, whose root is the run's directory. Readers need nothing but it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.log = CommitLog(store)

    # -- configuration --

    def create(self, config: Mapping[str, Json], fingerprint: Mapping[str, Json]) -> Mapping[str, Json]:
        """Record what the run is, once; afterwards ConfigError unless the fingerprint is the recorded one.

        Returns the configuration as it was recorded first.
        """
        data = encode({"config": config, "fingerprint": fingerprint})
        try:
            self.store.create(CONFIG, data)
        except AlreadyExists:
            recorded = self._run()
            now, then = decode(encode(fingerprint), url=self.store.url), recorded["fingerprint"]
            differ = sorted(k for k in {*now, *then} if now.get(k) != then.get(k))
            if differ:
                name = differ[0]
                also = f" (also: {', '.join(differ[1:])})" if differ[1:] else ""
                raise ConfigError(
                    field=name,
                    problem=f"is {now.get(name)!r}, and the run at {self.store.url} was started with "
                    f"{then.get(name)!r}{also}.",
                    remedy="Choose another run name, or the recorded value.",
                ) from None
            return recorded["config"]
        return config

    def config(self) -> Mapping[str, Json] | None:
        """The recorded configuration; None before the first start."""
        return self._run()["config"] if self.store.exists(CONFIG) else None

    # -- commits --

    def begin_term(self, holder: str) -> int:
        """Fence all controllers before: the first thing that a new one does after it took the lease."""
        self._check_log()
        return self.log.begin_term(holder)

    def commit(
        self,
        assembled: Assembled,
        *,
        term: int,
        generation: int,
        step: int,
        lineage: Sequence[tuple[int, int]],
        metrics: Sequence[tuple[str, float]] = (),
    ) -> Stored:
        """Make a checkpoint visible, or raise Fenced. Repeated, it changes nothing."""
        self.log.check(term)
        for record in self.log.valid():
            if (record.path, record.manifest_hash) == (assembled.directory, assembled.manifest_hash):
                return _stored(record)
        record = CommitRecord(
            kind="commit",
            step=step,
            generation=generation,
            path=assembled.directory,
            manifest_hash=assembled.manifest_hash,
            lineage=tuple((g, s) for g, s in lineage),
            metrics=tuple((k, v) for k, v in metrics),
        )
        return _stored(self.log.append(record, term))

    def commits(self) -> list[Stored]:
        """The checkpoints that are kept, in the order of their commits: the newest is last."""
        return [_stored(r) for r in self.records()]

    def records(self) -> tuple[CommitRecord, ...]:
        """Their whole records, with lineage, metrics and hash."""
        self._check_log()
        return self.log.valid()

    def newest(self) -> Stored | None:
        """What a run goes on from; None only if it never committed.

        NoCheckpoint if it did and nothing is left.
        """
        kept = self.commits()
        if not kept and self.ever_committed():
            raise self._nothing_left("every checkpoint of its log was removed")
        return kept[-1] if kept else None

    def ever_committed(self) -> bool:
        """Whether the run ever had a checkpoint: then it must not start from step 0."""
        self._check_log()
        return any(r.kind == "commit" for r in self.log.records())

    def record(self, stored: Stored) -> CommitRecord:
        """The commit's whole record; CheckpointDeleted if it isn't kept."""
        for record in self.log.valid():
            if record.slot == stored.slot:
                return record
        raise CheckpointDeleted(
            url=f"{self.store.url}/{stored.path}",
            problem="its run doesn't keep it (any more). Open a newer one.",
        )

    def keeps(self, stored: Stored) -> bool:
        """Whether its bytes must all be there."""
        return any(r.slot == stored.slot for r in self.log.valid())

    def before(self, stored: Stored) -> Stored | None:
        """The newest kept checkpoint that `stored` descends from: where to go when it is damaged."""
        child = self.record(stored)
        for record in reversed(self.log.valid()):
            if record.slot < child.slot and alive(child.lineage, record.generation, record.step):
                return _stored(record)
        return None

    # -- deletion --

    def prune(
        self,
        keep: Collection[int],
        in_flight: Collection[tuple[int, int]] = (),
        *,
        term: int,
        writing: int | None = None,
    ) -> Pruned:
        """Delete every checkpoint whose slot is not in `keep`, and attempts that nobody will commit.

        The newest commit stays whatever `keep` says; so do attempts of `in_flight` (generation, step), those
        of the generation that is `writing` beyond the newest commit, because its writers may not have
        reported yet, and files that a kept checkpoint refers to. What goes is first written to the log, so
        that a controller that was fenced meanwhile deletes nothing that its successor counts on.
        """
        there = self._attempts()  # before the log is read: what is committed later isn't in it
        self.log.check(term)
        slots, gone = self._unneeded(there, keep, in_flight, writing)
        if slots:
            self.log.append(CommitRecord(kind="prune", removes=slots), term)
        for directory, needed in gone.items():
            if needed:
                self.store.delete([f for f in self.store.list(directory) if f not in needed])
            else:
                self.store.delete_tree(directory)
        return Pruned(slots=slots, directories=tuple(gone))

    def unneeded(self, keep: Collection[int]) -> tuple[tuple[int, ...], dict[str, int]]:
        """What `prune` would do without saves in flight: slots, and the bytes to go by directory."""
        slots, gone = self._unneeded(self._attempts(), keep, (), None)
        sizes = {
            directory: sum(self.store.size(f) for f in self.store.list(directory) if f not in needed)
            for directory, needed in gone.items()
        }
        return slots, sizes

    def _unneeded(
        self,
        there: set[str],
        keep: Collection[int],
        in_flight: Collection[tuple[int, int]],
        writing: int | None,
    ) -> tuple[tuple[int, ...], dict[str, set[str]]]:
        """Slots and directories to go, and the files in them that kept checkpoints need."""
        kept = self.log.valid()
        slots = tuple(r.slot for r in kept[:-1] if r.slot not in keep)
        stay = {r.path for r in kept if r.slot not in slots}
        stay |= {attempt_path(step=step, generation=generation) for generation, step in in_flight}
        gone = sorted(path for path in there - stay if not (kept and _beyond(path, kept[-1], writing)))
        writers = [path for path in sorted({*there, *stay}) if path not in gone]
        needed = {f for path in writers for f in self._refers_to(path)} if gone else set[str]()
        return slots, {d: {f for f in needed if f.startswith(d + "/")} for d in gone}

    def _attempts(self) -> set[str]:
        """Directories of attempts, those with nothing but an unfinished write included."""
        found = {*self.store.list(CHECKPOINTS), *self.store.unfinished(CHECKPOINTS)}
        names = {p.split("/")[1] for p in found if "/" in p}
        return {f"{CHECKPOINTS}/{n}" for n in names if _ATTEMPT.fullmatch(n)}

    def _refers_to(self, path: str) -> list[str]:
        """Files of other checkpoints that a kept one needs, or one that is being written."""
        manifest = f"{path}/{MANIFEST}"
        found = [f for f in self.store.list(path) if f.endswith(".parquet")]
        needed: set[str] = set()
        for part in [manifest] if manifest in found else found:
            with suppress(StorageNotFound):  # deleted meanwhile
                files = Manifest.decode(self.store.read(part), url=f"{self.store.url}/{path}").distinct(
                    "file"
                )
                needed |= {posixpath.normpath(f"{path}/{f}") for f in files if f.startswith("../")}
        return sorted(needed)

    def _check_log(self) -> None:
        """A run with checkpoints has a log: without it, starting at step 0 would be silent."""
        if not self.log.records() and self._attempts():
            raise self._nothing_left("there are checkpoints, and the commit log is gone")

    def _nothing_left(self, problem: str) -> NoCheckpoint:
        remedy = "Restore the directory from a copy, or start a run under another name."
        return NoCheckpoint(url=self.store.url, problem=f"{problem}. {remedy}")

    def _run(self) -> Mapping[str, Json]:
        return decode(self.store.read(CONFIG), url=f"{self.store.url}/{CONFIG}")


def _beyond(path: str, newest: CommitRecord, writing: int | None) -> bool:
    """Whether an attempt may still be on its way: of a later step, by the generation that is writing."""
    found = _ATTEMPT.fullmatch(path.rpartition("/")[2])
    assert found is not None
    step, generation = int(found[1]), int(found[2])
    return step > newest.step and generation == writing


def _stored(record: CommitRecord) -> Stored:
    return Stored(
        slot=record.slot,
        step=record.step,
        generation=record.generation,
        term=record.term,
        path=record.path,
    )
