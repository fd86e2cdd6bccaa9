"""The training thread: runs the calls of a Member one after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class TrainingThread:
    """Calls given to `submit` run in order; what one raises is raised from its future, the thread goes on."""

    def __init__(self) -> None:
        self._calls: queue.Queue[tuple[Future[Any], Callable[[], Any]]] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def _run(self) -> None:
        while True:
            future, call = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the future
                future.set_exception(error)
            del future, call  # the last call's tensors must not outlive it here
