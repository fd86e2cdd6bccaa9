"""A process that loads samples: started fresh, never forked, gone when its pipe closes or its parent dies."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from elastic_train.data.numbered import NumberedSamples
from elastic_train.data.seeding import Seeding
from elastic_train.errors import LoaderLost, SampleFailed

Job = tuple[NumberedSamples, int, Seeding]
"""What a loader reads: data set, seed, seeding."""


def load(job: Job, epoch: int, ids: Sequence[int]) -> list[Any]:
    """The samples of these ids, each under its own seed."""
    dataset, seed, seeding = job
    samples: list[Any] = []
    for sample in ids:
        with seeding(seed, epoch, sample):
            samples.append(dataset[sample])
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

    def load(self, epoch: int, ids: Sequence[int]) -> list[Any]:
        """The samples; what the data set raised there is raised here. LoaderLost if the process died."""
        try:
            if self._payload is not None:
                self._pipe.send_bytes(self._payload)
                self._payload = None
            self._pipe.send_bytes(pickle.dumps((epoch, tuple(ids))))
            answer = self._pipe.recv_bytes()
        except (EOFError, OSError) as error:
            self.kill()
            raise LoaderLost(pid=self.pid, exitcode=self._process.wait()) from error
        samples = pickle.loads(answer)
        if isinstance(samples, Exception):
            raise samples
        return samples

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
                epoch, ids = pickle.loads(pipe.recv_bytes())
                try:
                    if job is None:
                        job = pickle.loads(payload)
                    answer = pickle.dumps(load(job, epoch, ids), protocol=pickle.HIGHEST_PROTOCOL)
                except Exception as error:  # noqa: BLE001 - whatever the data set raises is the answer
                    answer = _failure(error)
                pipe.send_bytes(answer)
        except (EOFError, OSError):
            return


def _failure(error: Exception) -> bytes:
    """The error as it was raised, its traceback in a note; a SampleFailed where it does not pickle."""
    text = "".join(traceback.format_exception(error))
    error.add_note(f"\nRaised in a loader process:\n{text}")
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # noqa: BLE001 - pickling somebody's exception may raise anything
        return pickle.dumps(SampleFailed(error=f"{type(error).__name__}: {error}", traceback=text))
    return packed
