"""How a worker's process ends itself. Nothing durable depends on a clean exit."""

from __future__ import annotations

import os

from elastic_train.cluster.outbox import Outbox
from elastic_train.cluster.worker.worker_reporter import WorkerReporter
from elastic_train.errors import DeviceFailed
from elastic_train.train.device_errors import of_device

LAST_WORDS_S = 5.0
"""How long a process that ends waits until the controller has heard why."""


def end_process(worker: str, why: str) -> None:
    """Nobody is left to work for, or nothing to work with."""
    os.write(2, f"worker {worker} ends itself: {why}\n".encode())
    os._exit(1)


class LastWords:
    """What errors say of a generation. Of a device that failed they say that this process is of no use: it
    tells so and ends, and no state that it held is offered, since nobody can read it.
    """

    def __init__(self, worker: str, reporter: WorkerReporter, outbox: Outbox) -> None:
        self._worker, self._reporter, self._outbox = worker, reporter, outbox

    def of(self, generation: int, error: Exception) -> Exception:
        """What to report; does not return where this process ends."""
        meant = of_device(error) or error
        if isinstance(meant, DeviceFailed):
            self._reporter.lost(generation, meant)
            self._outbox.flush(LAST_WORDS_S)
            end_process(self._worker, str(meant))
        return meant
