"""The directory of a run: its configuration, its commits, and what may be deleted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from elastic_train.checkpoint.commit import Assembled
from elastic_train.checkpoint.document import Json, decode, encode
from elastic_train.checkpoint.garbage import (
    CHECKPOINTS,
    Wanted,
    attempt_path,
    attempts,
    delete,
    leftovers,
    look,
)
from elastic_train.errors import (
    AlreadyExists,
    CheckpointDeleted,
    ConfigError,
    Fenced,
    Malformed,
    NoCheckpoint,
)
from elastic_train.recovery.evidence import Commitment, Stored
from elastic_train.recovery.lineage import alive
from elastic_train.storage.commit_log import CommitLog, CommitRecord
from elastic_train.storage.store import Store

__all__ = ["CHECKPOINTS", "CONFIG", "Pruned", "RunDirectory", "attempt_path"]

CONFIG = "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What a prune did: slots no longer kept, and directories of which something was deleted."""

    slots: tuple[int, ...]
    directories: tuple[str, ...]


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

    def branch(self) -> list[Commitment]:
        """The newest checkpoint and the kept ones that it descends from, oldest first."""
        kept = self.records()
        lineage = kept[-1].lineage if kept else ()
        return [
            Commitment(stored=_stored(r), metrics=r.metrics)
            for r in kept
            if r is kept[-1] or alive(lineage, r.generation, r.step)
        ]

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
        known: int | None = None,
        writing: int | None = None,
        told: Callable[[str], None] = lambda directory: None,
    ) -> Pruned:
        """Delete every checkpoint whose slot is not in `keep`, and attempts that nobody will commit.

        The newest commit stays whatever `keep` says, and so do those after the slot that was the newest
        `known` when it was decided, None for all. So do attempts of `in_flight` (generation, step), those of
        the generation that was `writing` then, beyond the newest commit, because its writers may not have
        reported yet, those of later generations, and files that a kept checkpoint refers to. What goes is
        first written to the log, so that a controller that was fenced meanwhile deletes nothing that its
        successor counts on. `told` hears of each directory that was cleared.
        """
        wanted = Wanted(keep=keep, known=known, in_flight=in_flight, writing=writing)
        self.log.check(term)
        first = look(self.store, self.log, wanted)
        if first.slots:
            self.log.append(CommitRecord(kind="prune", removes=first.slots), term)
        if first.gone or first.left:
            second = look(self.store, self.log, replace(wanted, keep=[r.slot for r in self.log.valid()]))
            doomed = first.both(second)
            delete(self.store, self.log, term, doomed, told)
            return Pruned(slots=first.slots, directories=tuple(doomed.gone))
        return Pruned(slots=first.slots, directories=())

    def unneeded(self, keep: Collection[int]) -> tuple[tuple[int, ...], dict[str, int]]:
        """What `prune` would do without saves in flight: slots, and the bytes to go by directory."""
        found = look(self.store, self.log, Wanted(keep=keep))
        sizes = {
            directory: sum(self.store.size(f) for f in self.store.list(directory) if f not in needed)
            for directory, needed in found.gone.items()
        }
        return found.slots, sizes

    # -- other runs that read here --

    def pin(self, commit: CommitRecord, reader: str) -> None:
        """Keep the files of a commit, and those it refers to, for the run at the URL `reader`, until `unpin`.

        Any process may, without controlling this run. CheckpointDeleted if a prune came first.
        """
        if any((p.path, p.holder) == (commit.path, reader) for p in self.log.pins()):
            return
        said = CommitRecord(
            kind="pin",
            holder=reader,
            step=commit.step,
            generation=commit.generation,
            path=commit.path,
            manifest_hash=commit.manifest_hash,
        )
        made = self._append(said)
        before = [r for r in self.log.records() if r.slot < made.slot]
        removed = {slot for r in before if r.kind == "prune" for slot in r.removes}
        if not any(r.path == commit.path and r.slot not in removed for r in before if r.kind != "fence"):
            self._append(CommitRecord(kind="prune", removes=(made.slot,)))
            raise CheckpointDeleted(
                url=f"{self.store.url}/{commit.path}",
                problem="its run doesn't keep it (any more). Open a newer one.",
            )

    def unpin(self, reader: str) -> int:
        """Take back what a run pinned here; how many checkpoints that was."""
        slots = tuple(p.slot for p in self.log.pins() if p.holder == reader)
        if slots:
            self._append(CommitRecord(kind="prune", removes=slots))
        return len(slots)

    def _append(self, record: CommitRecord) -> CommitRecord:
        """A record of somebody who doesn't control the run, under the term there is."""
        while True:
            with suppress(Fenced):  # a controller began in between
                return self.log.append(record, self.log.newest_term())

    def leftovers(self) -> list[str]:
        """What killed writers left in the log's directory; `prune` sweeps it."""
        return leftovers(self.store)

    def _check_log(self) -> None:
        """A run with checkpoints has a log: without it, starting at step 0 would be silent."""
        if not self.log.records() and attempts(self.store):
            raise self._nothing_left("there are checkpoints, and the commit log is gone")

    def _nothing_left(self, problem: str) -> NoCheckpoint:
        remedy = "Restore the directory from a copy, or start a run under another name."
        return NoCheckpoint(url=self.store.url, problem=f"{problem}. {remedy}")

    def _run(self) -> Mapping[str, Json]:
        url = f"{self.store.url}/{CONFIG}"
        said = decode(self.store.read(CONFIG), url=url)
        parts = (said.get("config"), said.get("fingerprint")) if isinstance(said, dict) else ()
        if len(parts) != 2 or not all(isinstance(part, dict) for part in parts):
            raise Malformed(
                url=url,
                problem="it has no configuration with a fingerprint. Restore it from a copy, or start a run "
                "under another name.",
            )
        return said


def _stored(record: CommitRecord) -> Stored:
    return Stored(
        slot=record.slot,
        step=record.step,
        generation=record.generation,
        term=record.term,
        path=record.path,
    )
