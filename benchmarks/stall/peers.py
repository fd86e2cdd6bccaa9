"""Systems of benchmarks/stall that come in packages of their own: `make bench-peers` installs them apart.

Each is used as its documentation says. Where one writes a torn file if the loop around it does not do its
part, or on a machine without a GPU, that is a row of its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.stall.systems import KEPT, Nothing, System, Tensors

STARTS_S = 120
"""How long a process of a system may take to start, on a machine that is busy."""

# Where a package is missing, its import fails in the process that was to measure it, which then is absent.


class Rotating(Nothing):
    """Keeps the newest few of what it writes, `step-number` each."""

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step}-{self.rank}"

    def drop_old(self) -> None:
        found = sorted(self.directory.glob(f"step-*-{self.rank}"), key=lambda p: int(p.name.split("-")[1]))
        for old in found[:-KEPT]:
            if old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.unlink(missing_ok=True)


class TorchSnapshot(Rotating):
    """`async_take` returns when the state is staged in host memory; nothing has to be waited for later."""

    def __init__(self, directory: Path, rank: int) -> None:
        super().__init__(directory, rank)
        from torchsnapshot import Snapshot, StateDict

        self._snapshot, self._state, self._pending = Snapshot, StateDict, None

    def save(self, step: int, tensors: Tensors) -> None:
        self.close()
        self._pending = self._snapshot.async_take(str(self.directory / f"ts-{step}"), self._app(tensors))

    def close(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def read(self, step: int, like: Tensors) -> Tensors | None:
        if not (self.directory / f"ts-{step}").exists():
            return None
        found = {name: torch.empty_like(value) for name, value in like.items()}
        app = self._app(found)
        self._snapshot(str(self.directory / f"ts-{step}")).restore(app)
        return dict(app["state"])

    def _app(self, tensors: Tensors) -> dict[str, Any]:
        return {"state": self._state(**{name.replace(".", "/"): t for name, t in tensors.items()})}


class TorchCheckpointing(Rotating):
    """`locks`: the update is guarded by `manager.lock()`, as its documentation asks of the loop."""

    def __init__(self, directory: Path, rank: int, *, locks: bool) -> None:
        super().__init__(directory, rank)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        pinned = torch.cuda.is_available()
        staging = CheckpointStagerConfig(use_pinned_memory=pinned, use_non_blocking_copy=pinned)
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(
                    staging_config=staging,
                    process_config=CheckpointProcessConfig(subprocess_init_timeout_secs=STARTS_S),
                ),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )
        self._locks = locks
        self._written: Future[Any] | None = None

    def save(self, step: int, tensors: Tensors) -> None:
        self._wait()
        self._written = self._manager.save(str(self.directory / f"step-{step}-0"), {"state": dict(tensors)})
        if self.rank == 0:
            self.drop_old()

    def before_update(self) -> None:
        if self._locks:
            with self._manager.lock():
                return

    def close(self) -> None:
        self._wait()

    def read(self, step: int, like: Tensors) -> Tensors | None:
        path = self.directory / f"step-{step}-0"
        if not path.exists():
            return None
        found = {name: torch.empty_like(value) for name, value in like.items()}
        return dict(self._manager.load(str(path), into={"state": found})["state"])

    def _wait(self) -> None:
        if self._written is not None:
            self._written.result()
            self._written = None


class DLRover(Rotating):
    """Flash checkpoint to the memory that its agent holds. It saves what all ranks share, on the first."""

    def __init__(self, directory: Path, rank: int) -> None:
        super().__init__(directory, rank)
        if torch.distributed.get_world_size() > 1:
            raise RuntimeError("it saves a state that all ranks share, and here each has its own")
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "ELASTIC_JOB_NAME": directory.name}
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self._memory = StorageType.MEMORY
        self._checkpointer = DdpCheckpointer(str(directory))
        self._saved = 0

    def save(self, step: int, tensors: Tensors) -> None:
        self._saved = step
        self._checkpointer.save_checkpoint(step, dict(tensors), storage_type=self._memory)

    def read(self, step: int, like: Tensors) -> Tensors | None:
        if step != self._saved:  # memory holds the newest
            return None
        found = self._checkpointer.load_checkpoint()
        Path("/dev/shm/ckpt_shm_0").unlink(missing_ok=True)  # it leaves its memory behind
        return {name: found[name] for name in like}


class Nvrx(Rotating):
    """Resiliency extension's asynchronous torch.save: by a fork, or by a process that stays."""

    alive: ClassVar[list[Any]] = []

    def __init__(self, directory: Path, rank: int, *, stays: bool) -> None:
        super().__init__(directory, rank)
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        if not torch.cuda.is_available():
            torch.cuda.synchronize = lambda device=None: None  # it calls this whatever the device
        self._saver = TorchAsyncCheckpoint(persistent_queue=stays)

    def save(self, step: int, tensors: Tensors) -> None:
        self._saver.finalize_async_save(blocking=True, no_dist=True)
        self._saver.async_save(dict(tensors), str(self.path(step)))
        self.drop_old()

    def close(self) -> None:
        self._saver.finalize_async_save(blocking=True, no_dist=True)
        self.alive.append(self._saver)  # its destructor may wait for its process for ever

    def read(self, step: int, like: Tensors) -> Tensors | None:
        return torch.load(self.path(step)) if self.path(step).exists() else None


PEERS: dict[str, Callable[[Path, int], System]] = {
    "torchsnapshot async_take": TorchSnapshot,
    "torch_checkpointing (lock)": lambda d, r: TorchCheckpointing(d, r, locks=True),
    "torch_checkpointing (no lock)": lambda d, r: TorchCheckpointing(d, r, locks=False),
    "DLRover flash (memory)": DLRover,
    "NVRx async (fork)": lambda d, r: Nvrx(d, r, stays=False),
    "NVRx async (persistent)": lambda d, r: Nvrx(d, r, stays=True),
}
