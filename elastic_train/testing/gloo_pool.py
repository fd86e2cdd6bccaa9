"""Persistent worker processes for tests of collectives, with ways to kill and stop them.

Processes are spawned, never forked: a forked child keeps sockets of its parent open and hangs in threaded
torch code. Importing torch costs seconds, so a pool is started once and used by many tests.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any

from elastic_train.testing.gloo_worker import READY, Call, Died, NamedCall, Outcome, Raised, Returned, serve
from elastic_train.train.collectives.tcp_store import serve_store

START_S = 150.0
"""How long a process may take to start on a busy machine; it isn't counted into the timeout of a call."""

ANSWER_S = 600.0
"""How long a call may take where nothing else is said: no test is to fail because a machine is slow."""


@dataclass(frozen=True, slots=True)
class PerRank:
    """An argument that differs between the called processes: one value for each of them, in their order."""

    values: Sequence[Any]


@dataclass(kw_only=True, eq=False)
class PoolError(Exception):
    """A call did not return: what became of it, process by process."""

    outcomes: dict[int, Outcome | None]

    def __str__(self) -> str:
        lines: list[str] = []
        for index, outcome in self.outcomes.items():
            match outcome:
                case Raised():
                    lines.append(f"process {index} raised:\n{outcome.traceback}")
                case Died():
                    lines.append(f"process {index} died with exit code {outcome.exitcode}")
                case None:
                    lines.append(f"process {index} did not answer in time")
                case Returned():
                    pass
        return "\n".join(lines)


@dataclass(slots=True)
class _Worker:
    process: SpawnProcess
    work: Connection
    control: Connection


class Pending:
    """A call under way in several processes."""

    def __init__(self, number: int, workers: dict[int, _Worker]) -> None:
        self._number = number
        self._workers = workers
        self._outcomes: dict[int, Outcome] = {}

    def outcomes(self, timeout: float = ANSWER_S, ranks: Iterable[int] | None = None) -> dict[int, Outcome]:
        """What became of the call in each process (of `ranks`); PoolError if one does not answer in time."""
        wanted = list(self._workers if ranks is None else ranks)
        deadline = time.monotonic() + timeout
        while missing := [index for index in wanted if index not in self._outcomes]:
            left = deadline - time.monotonic()
            if left <= 0:
                raise PoolError(outcomes={index: self._outcomes.get(index) for index in wanted})
            by_pipe = {self._workers[index].work: index for index in missing}
            for pipe in wait(list(by_pipe), timeout=left):
                index = by_pipe[pipe]  # type: ignore[index]
                number, outcome = _receive(self._workers[index].work, self._workers[index].process)
                if number in (None, self._number):  # else the late answer to a call that was given up
                    self._outcomes[index] = outcome
        return {index: self._outcomes[index] for index in wanted}

    def results(self, timeout: float = ANSWER_S, ranks: Iterable[int] | None = None) -> list[Any]:
        """The returned values; PoolError with the remote traceback if a process raised or died."""
        outcomes = self.outcomes(timeout, ranks)
        values = [outcome.value for outcome in outcomes.values() if isinstance(outcome, Returned)]
        if len(values) < len(outcomes):
            raise PoolError(outcomes=dict(outcomes))
        return values


class GlooPool:
    """`size` processes and a store server for their groups, at (`store_host`, `store_port`).

    A function is called as fn(state, *args): `state` is a dict that the process keeps between calls, with its
    own number under "index" and the type of its device under "device". `generations` gives numbers of groups
    that the store hasn't seen: a group that took an old number might read the addresses of processes that
    left it.
    """

    def __init__(self, size: int, device: str = "cpu") -> None:
        self.device = device
        self.store_host = "127.0.0.1"
        self._server, self.store_port = serve_store(self.store_host)
        self._numbers = itertools.count()
        self.generations: Iterator[int] = itertools.count(1)
        self._context = multiprocessing.get_context("spawn")
        self._workers = [self._spawn(index) for index in range(size)]
        for index in range(size):
            self._await(index)

    @property
    def size(self) -> int:
        return len(self._workers)

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout: float = ANSWER_S,
    ) -> list[Any]:
        """Call in parallel on each process's main thread and wait; values in the order of `ranks`."""
        return self.call_async(fn, *args, ranks=ranks).results(timeout)

    def call_async(self, fn: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None) -> Pending:
        """Start a call; `Pending.outcomes` and `Pending.results` wait for it."""
        chosen = list(range(self.size) if ranks is None else ranks)
        number = next(self._numbers)
        for position, index in enumerate(chosen):
            own = tuple(a.values[position] if isinstance(a, PerRank) else a for a in args)
            self._workers[index].work.send(Call(number=number, fn=NamedCall.of(fn), args=own))
        return Pending(number, {index: self._workers[index] for index in chosen})

    def control(self, rank: int, fn: Callable[..., Any], *args: Any, timeout: float = ANSWER_S) -> Any:
        """Call on the process's second thread, also while its main thread is busy."""
        worker, number = self._workers[rank], next(self._numbers)
        worker.control.send(Call(number=number, fn=NamedCall.of(fn), args=args))
        deadline = time.monotonic() + timeout
        while worker.control.poll(max(0.0, deadline - time.monotonic())):
            answered, outcome = _receive(worker.control, worker.process)
            if isinstance(outcome, Returned) and answered == number:
                return outcome.value
            if answered in (None, number):
                raise PoolError(outcomes={rank: outcome})
        raise PoolError(outcomes={rank: None})

    def kill(self, rank: int) -> None:
        """SIGKILL, and wait until the process is gone."""
        process = self._workers[rank].process
        process.kill()
        process.join()

    def stop(self, rank: int) -> None:
        """SIGSTOP: the process stays and says nothing, like a host behind a cut cable."""
        os.kill(self._pid(rank), signal.SIGSTOP)

    def cont(self, rank: int) -> None:
        """SIGCONT after `stop`."""
        os.kill(self._pid(rank), signal.SIGCONT)

    def restart(self, rank: int) -> None:
        """A new process in the place of an old one, with an empty state."""
        self._end(self._workers[rank])
        self._workers[rank] = self._spawn(rank)
        self._await(rank)

    def resize(self, size: int) -> None:
        """More processes, or the last ones ended."""
        for worker in self._workers[size:]:
            self._end(worker)
        known = len(self._workers)
        self._workers = self._workers[:size] + [self._spawn(index) for index in range(known, size)]
        for index in range(known, size):
            self._await(index)

    def alive(self, rank: int) -> bool:
        return self._workers[rank].process.is_alive()

    def close(self) -> None:
        """End every process, stopped ones too."""
        for worker in self._workers:
            self._end(worker)
        self._workers = []

    def __enter__(self) -> GlooPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _spawn(self, index: int) -> _Worker:
        work, far_work = self._context.Pipe()
        control, far_control = self._context.Pipe()
        process = self._context.Process(
            target=serve, args=(index, far_work, far_control, self.device), daemon=True
        )
        process.start()
        far_work.close()
        far_control.close()
        return _Worker(process, work, control)

    def _await(self, index: int) -> None:
        worker = self._workers[index]
        if not worker.work.poll(START_S) or _receive(worker.work, worker.process)[0] != READY:
            raise PoolError(outcomes={index: None})

    def _end(self, worker: _Worker) -> None:
        worker.process.kill()
        worker.process.join()
        worker.work.close()
        worker.control.close()

    def _pid(self, rank: int) -> int:
        pid = self._workers[rank].process.pid
        assert pid is not None
        return pid


def _receive(pipe: Connection, process: SpawnProcess) -> tuple[int | None, Outcome]:
    """The next answer and the number of its call; None for that of a process that died."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        process.join()
        return None, Died(exitcode=process.exitcode)
