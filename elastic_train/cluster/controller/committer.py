"""The controller's access to storage: lease, term, commits and deletions, in order.

Commits and deletions are effects of one lane that keeps order, so that a deletion never meets a commit of the
same term. A commit that was late and comes true all the same is told, too: it is a fact of storage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.writer import WrittenPart
from elastic_train.cluster.checkpoint_io import read_document
from elastic_train.cluster.controller.effect_endings import begin_events, why_not
from elastic_train.cluster.controller.effects import Done, Effect, Effects, Ending, Failed, Lane
from elastic_train.config import RunSpec
from elastic_train.control.commands import Commit, Prune
from elastic_train.control.events import CheckpointCommitted, Event, FencedOff, LogRead, SaveFailed
from elastic_train.errors import CheckpointError, Fenced
from elastic_train.recovery.evidence import Commitment, Stored
from elastic_train.storage.commit_log import CommitLog
from elastic_train.storage.fsspec_store import child_url, open_store
from elastic_train.storage.lease import Lease

log = logging.getLogger(__name__)
MOD = 1 << 64
SAVES = 3.0
"""Times what the slowest part took to write, which tells how fast storage is."""


class Committer:
    """`lineage` is kept up to date by the controller: generations and the steps they started from."""

    def __init__(self, spec: RunSpec, holder: str, post: Callable[[Event], None], effects: Effects) -> None:
        self._spec, self._holder, self._post, self._effects = spec, holder, post, effects
        self.store = open_store(child_url(spec.storage_path, spec.name))
        self._run = RunDirectory(self.store)
        self._lease = Lease(self.store, holder=holder, lease_s=spec.timing.lease_s)
        self._term = 0
        self._patience_s = spec.timing.storage_trouble_s
        self._committing: set[tuple[int, int]] = set()
        self.lineage: tuple[tuple[int, int], ...] = ()

    def take_over(self) -> int:
        """Own the run: lease, configuration, fence. Returns the term."""
        self._lease.acquire()
        self._run.create(_configuration(self._spec), _fingerprint(self._spec))
        self._term = self._run.begin_term(self._holder)
        self._lease.renew(self._term)
        return self._term

    @property
    def log(self) -> CommitLog:
        return self._run.log

    def newest(self) -> tuple[Stored | None, tuple[Commitment, ...]]:
        """The newest checkpoint, and what is kept of its branch."""
        return self._run.newest(), tuple(self._run.branch())

    def before(self, stored: Stored) -> Stored | None:
        """Where to go when it is damaged; None, too, where the log does not keep it."""
        with suppress(CheckpointError):
            return self._run.before(stored)
        return None

    def renew(self) -> None:
        """Raises Fenced where another controller took the run: the log says so, whatever the lease does."""
        self._run.log.check(self._term)
        self._lease.renew(self._term)

    def release(self) -> None:
        self._lease.release()

    def commit(self, command: Commit) -> None:
        """Ends in CheckpointCommitted, SaveFailed or FencedOff."""
        lineage = tuple((g, s) for g, s in self.lineage if g <= command.generation)
        name = f"committing step {command.step} of generation {command.generation}"
        key = (command.generation, command.step)
        if key in self._committing:  # it has not ended: that tells how this one ends, too
            return
        self._committing.add(key)

        def ended(ending: Ending[Stored]) -> None:
            self._committing.discard(key)
            match ending:
                case Done(value=stored):
                    self._post(CheckpointCommitted(at=0.0, stored=stored, metrics=command.metrics))
                case Failed(error=Fenced(by_term=term)):
                    self._post(FencedOff(at=0.0, by_term=term))
                case _:
                    problem = f"commit: {why_not(name, ending).detail}"
                    failed = SaveFailed(
                        at=0.0, generation=command.generation, step=command.step, problem=problem
                    )
                    self._post(failed)

        self._effects.begin(
            Effect(
                name=name,
                lane=Lane.STORAGE,
                within_s=self._patience_s + SAVES * max((p.seconds for p in command.parts), default=0.0),
                call=lambda: self._commit(command, lineage),
                ended=ended,
                lasting=True,
            )
        )

    def read_log(self) -> None:
        """Ends in LogRead."""

        def said() -> tuple[Event, ...]:
            stored, kept = self.newest()
            return (LogRead(at=0.0, stored=stored, kept=kept),)

        begin_events(
            self._effects,
            "reading the commit log",
            Lane.STORAGE,
            self._patience_s,
            said,
            post=self._post,
            otherwise=lambda cause: LogRead(at=0.0, problem=cause.detail),
        )

    def prune(self, command: Prune) -> None:
        """What was not deleted is left to the next prune."""
        writing = self.lineage[-1][0] if self.lineage else None
        known = max(command.keep, default=0)  # commits that this lane does first may not have been told yet

        def prune() -> None:
            self._run.prune(command.keep, command.in_flight, term=self._term, known=known, writing=writing)

        def ended(ending: Ending[None]) -> None:
            match ending:
                case Done():
                    pass
                case Failed(error=Fenced(by_term=term)):
                    self._post(FencedOff(at=0.0, by_term=term))
                case _:
                    why = why_not("deleting old checkpoints", ending).detail
                    log.warning("old checkpoints were not deleted; the next prune tries again: %s", why)

        self._effects.begin(
            Effect(
                name="deleting old checkpoints",
                lane=Lane.STORAGE,
                within_s=self._patience_s,
                call=prune,
                ended=ended,
            )
        )

    def _commit(self, command: Commit, lineage: tuple[tuple[int, int], ...]) -> Stored:
        directory = attempt_path(step=command.step, generation=command.generation)
        parts = [
            WrittenPart(writer=p.rank, manifest=p.manifest, digest=p.digest, bytes=p.bytes)
            for p in command.parts
        ]
        document = read_document(self.store, directory) | {
            "state_digest": sum(p.state_digest for p in command.parts) % MOD,
            "lineage": [list(entry) for entry in lineage],
            "metrics": dict(command.metrics),
            "versions": versions(),
        }
        assembled = assemble(self.store, directory, parts, document, aliases=document["aliases"])
        return self._run.commit(
            assembled,
            term=self._term,
            generation=command.generation,
            step=command.step,
            lineage=lineage,
            metrics=command.metrics,
        )


def versions(names: tuple[str, ...] = ("elastic_train", "torch", "ray")) -> dict[str, str]:
    """Of what a checkpoint was written with. A package that came as a directory has none that could be
    told.
    """
    found: dict[str, str] = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _fingerprint(spec: RunSpec) -> dict[str, Any]:
    """The training problem as far as the configuration states it: it may not change under one name."""
    batch = spec.batch
    return {
        "batch.global_size": batch.global_size,
        "batch.micro_size": batch.micro_size,
        "batch.seed": batch.seed,
        "batch.drop_last": batch.drop_last,
        "batch.shuffle": batch.shuffle,
        "precision": spec.precision,
        "clip_norm": spec.clip_norm,
    }


def _configuration(spec: RunSpec) -> dict[str, Any]:
    return {
        **_fingerprint(spec),
        "name": spec.name,
        "max_steps": spec.max_steps,
        "workers": [spec.min_workers, spec.max_workers],
        "checkpoints.every": spec.checkpoints.every,
        "checkpoints.peers": spec.checkpoints.peers,
        "checkpoints.keep": spec.checkpoints.keep,
    }
