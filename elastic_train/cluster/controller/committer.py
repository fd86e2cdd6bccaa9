"""The controller's hand on storage: the lease, the term, commits and deletions, one after the other.

Everything that writes runs on one thread, so that a deletion never meets a commit of the same term.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from importlib.metadata import version
from typing import Any

from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.writer import WrittenPart
from elastic_train.cluster.checkpoint_io import read_document
from elastic_train.config import RunSpec
from elastic_train.control.commands import Commit, Prune
from elastic_train.control.events import CheckpointCommitted, Event, FencedOff, SaveFailed
from elastic_train.errors import CheckpointError, Fenced, StorageError
from elastic_train.recovery.evidence import Stored
from elastic_train.storage.commit_log import CommitLog
from elastic_train.storage.fsspec_store import child_url, open_store
from elastic_train.storage.lease import Lease

log = logging.getLogger(__name__)
MOD = 1 << 64


class Committer:
    """`lineage` is kept up to date by the controller: generations and the steps they started from."""

    def __init__(self, spec: RunSpec, holder: str, post: Callable[[Event], None], storage: Executor) -> None:
        self._spec, self._holder, self._post, self._storage = spec, holder, post, storage
        self.store = open_store(child_url(spec.storage_path, spec.name))
        self._run = RunDirectory(self.store)
        self._lease = Lease(self.store, holder=holder, lease_s=spec.timing.lease_s)
        self._term = 0
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

    def newest(self) -> Stored | None:
        return self._run.newest()

    def before(self, stored: Stored) -> Stored | None:
        return self._run.before(stored)

    def renew(self) -> None:
        """Raises Fenced where another controller took the run: the log says so, whatever the lease does."""
        self._run.log.check(self._term)
        self._lease.renew(self._term)

    def release(self) -> None:
        self._lease.release()

    def commit(self, command: Commit) -> None:
        self._storage.submit(self._commit, command, self.lineage)

    def prune(self, command: Prune) -> None:
        self._storage.submit(self._prune, command, self.lineage[-1][0] if self.lineage else None)

    def _commit(self, command: Commit, lineage: tuple[tuple[int, int], ...]) -> None:
        directory = attempt_path(step=command.step, generation=command.generation)
        lineage = tuple((g, s) for g, s in lineage if g <= command.generation)
        parts = [
            WrittenPart(writer=p.rank, manifest=p.manifest, digest=p.digest, bytes=p.bytes)
            for p in command.parts
        ]
        try:
            document = read_document(self.store, directory) | {
                "state_digest": sum(p.state_digest for p in command.parts) % MOD,
                "lineage": [list(entry) for entry in lineage],
                "metrics": dict(command.metrics),
                "versions": {name: version(name) for name in ("elastic_train", "torch", "ray")},
            }
            assembled = assemble(self.store, directory, parts, document, aliases=document["aliases"])
            stored = self._run.commit(
                assembled,
                term=self._term,
                generation=command.generation,
                step=command.step,
                lineage=lineage,
                metrics=command.metrics,
            )
        except Fenced as error:
            self._post(FencedOff(at=0.0, by_term=error.by_term))
        except (StorageError, CheckpointError) as error:
            self._post(
                SaveFailed(at=0.0, generation=command.generation, step=command.step, problem=str(error))
            )
        else:
            self._post(CheckpointCommitted(at=0.0, stored=stored, metrics=command.metrics))

    def _prune(self, command: Prune, writing: int | None) -> None:
        try:
            self._run.prune(command.keep, command.in_flight, term=self._term, writing=writing)
        except Fenced as error:
            self._post(FencedOff(at=0.0, by_term=error.by_term))
        except (StorageError, CheckpointError) as error:
            log.warning("old checkpoints were not deleted; the next prune tries again: %s", error)


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
