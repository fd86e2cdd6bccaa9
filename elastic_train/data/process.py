"""A process that loads samples: started fresh, never forked, gone when its pipe closes or its parent dies."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from elastic_train.data.numbered import NumberedSamples, tell_epoch
from elastic_train.data.order import MicroBatch
from elastic_train.data.seeding import Seeding
from elastic_train.errors import LoaderLost, SampleFailed

Combine = Callable[[list[Any], MicroBatch], Any]
"""What makes a micro-batch of its samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a loader does: reads samples under seeds, and combines those of a micro-batch."""

    dataset: NumberedSamples
    seed: int
    seeding: Seeding
    combine: Combine

    def read(self, micro_batch: MicroBatch) -> list[Any]:
        """Its samples, each under its own seed."""
        tell_epoch(self.dataset, micro_batch.epoch)
        samples: list[Any] = []
        for sample in micro_batch.ids:
            with self.seeding(self.seed, micro_batch.epoch, sample):
                samples.append(self.dataset[sample])
        return samples

    def run(self, micro_batch: MicroBatch) -> Any:
        return self.combine(self.read(micro_batch), micro_batch)


def samples_alone(samples: list[Any], _micro_batch: MicroBatch) -> list[Any]:
    """Leaves the samples of a micro-batch as they are."""
    return samples


class LoaderProcess:
    """A new interpreter with its own copy of the data set, `payload` being the pickled Job.

    Not a fork, which would carry the parent's sockets and half of its threads. Not multiprocessing's spawn
    either, which runs the parent's main module once more.
    """

    def __init__(self, payload: bytes):
        self._payload: bytes | None = payload
        self._pipe, theirs = multiprocessing.Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"from elastic_train.data.process import serve\nserve({theirs.fileno()})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, micro_batch: MicroBatch) -> Any:
        """What became of it; what user code raised there is raised here. LoaderLost if the process died."""
        try:
            if self._payload is not None:
                self._pipe.send_bytes(self._payload)
                self._payload = None
            self._pipe.send_bytes(pickle.dumps(micro_batch))
            answer = self._pipe.recv_bytes()
        except (EOFError, OSError) as error:
            self.kill()
            raise LoaderLost(pid=self.pid, exitcode=self._process.wait()) from error
        kind, value = pickle.loads(answer)
        if kind == "raised":
            raise value
        return value

    def kill(self) -> None:
        """End the process; a request under way fails with LoaderLost. Ending it twice is free."""
        self._process.kill()

    def close(self) -> None:
        """End the process and wait until it is gone. Nobody may be in `load`."""
        self.kill()
        self._process.wait()
        self._pipe.close()


def serve(descriptor: int) -> None:
    """The whole life of the process: answer requests until the pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # said to the whole group; they are the parent's to heed
        signal.signal(number, signal.SIG_IGN)
    with Connection(descriptor) as pipe:
        try:
            payload = pipe.recv_bytes()
            job = None
            while True:
                micro_batch = pickle.loads(pipe.recv_bytes())
                try:
                    if job is None:
                        job = pickle.loads(payload)
                    answer = pickle.dumps(("made", job.run(micro_batch)), protocol=pickle.HIGHEST_PROTOCOL)
                except Exception as error:  # noqa: BLE001 - whatever user code raises is the answer
                    answer = _failure(error)
                pipe.send_bytes(answer)
        except (EOFError, OSError):
            return


def _failure(error: Exception) -> bytes:
    """The error as it was raised, its traceback in a note; a SampleFailed where it does not pickle."""
    text = "".join(traceback.format_exception(error))
    error.add_note(f"\nRaised in a loader process:\n{text}")
    try:
        packed = pickle.dumps(("raised", error))
        pickle.loads(packed)
    except Exception:  # noqa: BLE001 - pickling somebody's exception may raise anything
        failed = SampleFailed(error=f"{type(error).__name__}: {error}", traceback=text)
        return pickle.dumps(("raised", failed))
    return packed
