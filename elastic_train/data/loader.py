"""Micro-batches, read ahead of the training thread.

The loader holds no progress: it gives what is asked for, and reads ahead what the asker says comes next. What
was read ahead and is never asked for is dropped, so a stop, a resume or a resize neither skips nor repeats.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from elastic_train.data.numbered import NumberedSamples, follows_epochs, numbered
from elastic_train.data.order import MicroBatch
from elastic_train.data.process import Combine, Job, LoaderProcess, samples_alone
from elastic_train.data.seeding import Seeding, unseeded
from elastic_train.errors import ConfigError, LoaderLost


class Loader:
    """Loads micro-batches in `workers` processes of its own, or in this one.

    With `workers=0` a source that draws no random numbers is read ahead in a thread; any other data set is
    read when it is asked for, in the asker's thread, because seeding would reach into the generators of the
    training thread. `ahead` is how many micro-batches are kept ready, at least one per process. `combine`
    makes a micro-batch of its samples, in the process that read them or in the asker's thread. `dumps`
    pickles both for the processes; one that pickles by value carries the classes of a job file.
    """

    def __init__(
        self,
        dataset: NumberedSamples,
        *,
        seed: int,
        seeding: Seeding = unseeded,
        combine: Combine = samples_alone,
        workers: int = 0,
        ahead: int = 2,
        dumps: Callable[[Any], bytes] = pickle.dumps,
    ):
        if workers < 0:
            raise ConfigError(field="loader.workers", problem=f"must be 0 or more, got {workers}.")
        # A thread beside training must not change the epoch of a data set that others read too.
        draws_nothing = bool(getattr(dataset, "draws_nothing", False)) and not follows_epochs(dataset)
        # A thread beside training must not touch the global generators, not even to put them back.
        used = seeding if workers or not draws_nothing else unseeded
        self._job = Job(dataset=numbered(dataset), seed=seed, seeding=used, combine=combine)
        self._ahead = max(ahead, workers)
        self.dumps = dumps
        self._pending: dict[MicroBatch, Future[Any]] = {}
        self._processes = _Processes(_payload(self._job, dumps), workers) if workers else None
        threads = workers or int(draws_nothing)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="loader") if threads else None

    def load(self, micro_batch: MicroBatch, upcoming: Sequence[MicroBatch] = ()) -> Any:
        """What `combine` makes of a micro-batch's samples; `upcoming` are those that come next.

        Whatever the data set raises is raised here, by the request for the micro-batch that it concerns;
        LoaderLost if a process died, which is then replaced.
        """
        if self._threads is None:
            return self._job.run(micro_batch)
        wanted = (micro_batch, *upcoming[: self._ahead])
        for stale in self._pending.keys() - set(wanted):
            self._pending.pop(stale).cancel()
        for each in wanted:
            if each not in self._pending:
                self._pending[each] = self._threads.submit(self._fetch, each)
        loaded = self._pending.pop(micro_batch).result()
        return loaded if self._processes is not None else self._job.combine(loaded, micro_batch)

    def close(self) -> None:
        """End threads and processes and drop what was read ahead. Closing twice is free."""
        self._pending.clear()
        if self._threads is not None:
            if self._processes is not None:
                self._processes.kill()
            # Without processes a thread may hang in a read that nobody can end: it is not waited for.
            self._threads.shutdown(wait=self._processes is not None, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fetch(self, micro_batch: MicroBatch) -> Any:
        """A thread beside training reads; it must not combine, which may draw random numbers."""
        if self._processes is None:
            return self._job.read(micro_batch)
        return self._processes.load(micro_batch)


class _Processes:
    """A fixed number of loader processes, each lent to one thread at a time; a dead one is replaced.

    They start when something is loaded for the first time.
    """

    def __init__(self, payload: bytes, number: int):
        self._payload, self._number = payload, number
        self._started = self._closing = False
        self._lock = threading.Lock()
        self._all: set[LoaderProcess] = set()
        self._idle: queue.SimpleQueue[LoaderProcess] = queue.SimpleQueue()

    def load(self, micro_batch: MicroBatch) -> Any:
        self._start()
        process = self._idle.get()
        try:
            return process.load(micro_batch)
        except LoaderLost:
            process = self._replace(process)
            raise
        finally:
            self._idle.put(process)

    def _start(self) -> None:
        with self._lock:
            if self._closing:
                raise CancelledError
            if self._started:
                return
            self._started = True
            self._all = {LoaderProcess(self._payload) for _ in range(self._number)}
            for process in self._all:
                self._idle.put(process)

    def kill(self) -> None:
        """Fail the requests under way; none is replaced from here on."""
        with self._lock:
            self._closing = True
            for process in self._all:
                process.kill()

    def close(self) -> None:
        self.kill()
        for process in self._all:
            process.close()
        self._all.clear()

    def _replace(self, dead: LoaderProcess) -> LoaderProcess:
        with self._lock:
            if self._closing:
                return dead
            self._all.remove(dead)
            dead.close()
            fresh = LoaderProcess(self._payload)
            self._all.add(fresh)
            return fresh


def _payload(job: Job, dumps: Callable[[Any], bytes]) -> bytes:
    try:
        return dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            field="loader.workers",
            problem=f"the data set or its task does not pickle, so no other process can load it: {error}.",
            remedy="Open files and connections at first use, or set workers=0.",
        ) from error
