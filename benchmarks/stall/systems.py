"""The systems of benchmarks/stall: each saves the same tensors, and says how to read them again.

`save` is called right after an update, `before_update` right before the next one, `close` after the last
step. What they take of the training thread's time is the stall.
"""

from __future__ import annotations

import multiprocessing
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
    save,
)

from benchmarks.stall.peer_store import keep
from elastic_train.checkpoint.engine.arena import Arena, slot_bytes
from elastic_train.checkpoint.engine.counts import Counts
from elastic_train.checkpoint.engine.engine import Engine
from elastic_train.checkpoint.snapshot import Snapshot
from elastic_train.geometry.box import Box
from elastic_train.train.snapshot.tensor_sources import TensorSource
from elastic_train.train.state.live_fragments import DTYPE_NAMES, Replica, TensorPart, table

Tensors = dict[str, torch.Tensor]
SLOTS = 3
KEPT = 4
"""Checkpoints that stay on disk."""
TEARS = "DCP async_save (DefaultStager, background, not waited for)"


class System(Protocol):
    def save(self, step: int, tensors: Tensors) -> None: ...
    def before_update(self) -> None: ...
    def close(self) -> None: ...
    def read(self, step: int, like: Tensors) -> Tensors | None:
        """What was saved of a step; None where nothing is kept to be read."""
        ...


class Nothing:
    def __init__(self, directory: Path, rank: int) -> None:
        self.directory, self.rank = directory, rank

    def save(self, step: int, tensors: Tensors) -> None:
        return None

    def before_update(self) -> None:
        return None

    def close(self) -> None:
        return None

    def read(self, step: int, like: Tensors) -> Tensors | None:
        return None


class TorchSave(Nothing):
    def save(self, step: int, tensors: Tensors) -> None:
        torch.save(tensors, self._path(step))
        for old in sorted(self.directory.glob(f"*-{self.rank}.pt"), key=lambda p: int(p.name.split("-")[0]))[
            :-KEPT
        ]:
            old.unlink()

    def read(self, step: int, like: Tensors) -> Tensors | None:
        return torch.load(self._path(step)) if self._path(step).exists() else None

    def _path(self, step: int) -> Path:
        return self.directory / f"{step}-{self.rank}.pt"


class DcpSave(Nothing):
    def save(self, step: int, tensors: Tensors) -> None:
        save(dict(tensors), checkpoint_id=self._path(step))
        self._drop(step)

    def read(self, step: int, like: Tensors) -> Tensors | None:
        if not self._path(step).exists():
            return None
        found = {name: torch.empty_like(value) for name, value in like.items()}
        load(found, checkpoint_id=self._path(step))
        return found

    def _path(self, step: int) -> Path:
        return self.directory / f"dcp-{step}"

    def _drop(self, step: int) -> None:
        if self.rank == 0:
            for old in sorted(self.directory.glob("dcp-*"), key=lambda p: int(p.name[4:]))[:-KEPT]:
                shutil.rmtree(old, ignore_errors=True)


class DcpAsync(DcpSave):
    """DCP's asynchronous save. One that stages in the background is waited for before the update, as its
    documentation asks, unless `waits` says otherwise: then it saves what the update is writing.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        *,
        kind: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
        stager: Callable[[], DefaultStager] | None = None,
        waits: bool = True,
    ) -> None:
        super().__init__(directory, rank)
        self._kind, self._stager, self._waits = kind, stager() if stager is not None else None, waits
        self._staged: Future[None] | None = None
        self._uploaded: Future[Any] | None = None

    def save(self, step: int, tensors: Tensors) -> None:
        if self._uploaded is not None:
            self._uploaded.result()
        answer = async_save(
            dict(tensors),
            checkpoint_id=self._path(step),
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        if isinstance(answer, AsyncSaveResponse):
            self._staged, self._uploaded = answer.staging_completion, answer.upload_completion
        else:
            self._uploaded = answer
        self._drop(step)

    def before_update(self) -> None:
        if self._waits and self._staged is not None:
            self._staged.result()
            self._staged = None

    def close(self) -> None:
        if self._uploaded is not None:
            self._uploaded.result()


class Ours(Nothing):
    """The engine, into shared memory; a peer store process copies each snapshot once more, as the node that
    holds the second copy does, and writes it to files where `storage` is given.
    """

    def __init__(self, directory: Path, rank: int, *, storage: bool) -> None:
        super().__init__(directory, rank)
        self._storage, self._engine = storage, None
        self._path = Path("/dev/shm") / f"stall-{directory.name}-{rank}"
        self._kept: dict[int, list[tuple[str, np.ndarray]]] = {}
        self._before: Snapshot | None = None
        self._flushed: Snapshot | None = None
        self._lock, self._copied, self._idle = threading.Lock(), threading.Semaphore(0), threading.Event()
        self._idle.set()

    def save(self, step: int, tensors: Tensors) -> None:
        sources = [TensorSource(part_of(name, value)) for name, value in tensors.items()]
        if self._engine is None:
            self._start(slot_bytes(s.nbytes for s in sources))
        assert self._engine is not None
        fragments = table(source.part for source in sources)
        self._engine.begin(
            Snapshot(generation=1, rank=self.rank, step=step, fragments=fragments, document={}), sources
        )

    def before_update(self) -> None:
        if self._engine is not None:
            self._engine.fence()

    @property
    def counts(self) -> Counts:
        return self._engine.counts if self._engine is not None else Counts()

    def close(self) -> None:
        if self._engine is None:
            return
        self._engine.close()
        assert not self.counts.failed, f"{self.counts.failed} snapshots failed"
        self._idle.wait()
        self._pipe.send(None)
        self._peer_store.join()
        self._path.unlink()

    def read(self, step: int, like: Tensors) -> Tensors | None:
        if step not in self._kept:
            return None
        return {
            name: torch.from_numpy(data).view(like[name].dtype).view_as(like[name])
            for name, data in self._kept[step]
        }

    def _start(self, size: int) -> None:
        arena = Arena.create(self._path, size, slots=SLOTS)
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        store = str(self.directory) if self._storage else None
        self._peer_store = context.Process(
            target=keep, args=(other, str(self._path), arena.size, SLOTS, store, self.rank)
        )
        self._peer_store.start()
        other.close()  # if the peer store dies, that is heard here
        assert self._pipe.recv() == ("ready", 0)
        threading.Thread(target=self._hear, daemon=True).start()
        self._engine = Engine(arena, self._deliver)

    def _deliver(self, taken: Snapshot) -> None:
        pieces = tuple(taken.pieces())
        named = zip(taken.buffer.offsets, pieces, strict=True)
        places = [(piece.tensor, offset, piece.data_bytes) for offset, piece in named]
        flush = self._storage and self._idle.is_set()
        if flush:
            self._idle.clear()
            self._flushed = taken
        self._pipe.send((taken.step, taken.buffer.slot, places, flush))
        self._copied.acquire()
        kept = [(piece.tensor, np.frombuffer(piece.bytes(), np.uint8)) for piece in pieces]
        self._kept = {taken.step: kept}
        with self._lock:
            before, self._before = self._before, taken
            used = before is None or before is self._flushed
        if before is not None and not used:
            before.buffer.release()

    def _hear(self) -> None:
        """What the peer store says: a copy is complete, or a checkpoint durable."""
        while True:
            try:
                word, _ = self._pipe.recv()
            except (EOFError, OSError):
                return
            if word == "copied":
                self._copied.release()
                continue
            with self._lock:
                done, self._flushed = self._flushed, None
                used = done is None or done is self._before
            if done is not None and not used:
                done.buffer.release()
            self._idle.set()


def part_of(name: str, value: torch.Tensor) -> TensorPart:
    shape = tuple(value.shape)
    return TensorPart(
        tensor=name,
        state="param",
        dtype=DTYPE_NAMES[value.dtype],
        shape=shape,
        box=Box.whole(shape),
        view=value.detach(),
        replica=Replica(),
    )


def _stager(*, shared: bool, background: bool) -> Callable[[], DefaultStager]:
    return lambda: DefaultStager(
        StagingOptions(
            use_pinned_memory=torch.cuda.is_available(),
            use_shared_memory=shared,
            use_async_staging=background,
            use_non_blocking_copy=torch.cuda.is_available(),
        )
    )


SYSTEMS: dict[str, Callable[[Path, int], System]] = {
    "none": Nothing,
    "ours (peer)": lambda d, r: Ours(d, r, storage=False),
    "ours (peer + storage)": lambda d, r: Ours(d, r, storage=True),
    "torch.save": TorchSave,
    "DCP save": DcpSave,
    "DCP async_save (thread)": DcpAsync,
    "DCP async_save (DefaultStager)": lambda d, r: DcpAsync(
        d, r, stager=_stager(shared=True, background=False)
    ),
    "DCP async_save (DefaultStager, background)": lambda d, r: DcpAsync(
        d, r, stager=_stager(shared=True, background=True)
    ),
    TEARS: lambda d, r: DcpAsync(d, r, stager=_stager(shared=True, background=True), waits=False),
    "DCP async_save (process)": lambda d, r: DcpAsync(d, r, kind=AsyncCheckpointerType.PROCESS),
}
