"""A gloo group whose operations end when their generation is broken, whatever gloo is doing.

Closing gloo's sockets wakes most of its operations, but not one that is half sent or half received: gloo
tells an error to the operations it has queued, not to those it has begun (`Pair::signalException`), so such
a one waits out its own timeout. A peer that stops in the middle of a message leaves its neighbours in that
state. Here the waiting thread leaves such an operation behind. It cannot touch its tensors any more, for
its sockets are closed, but gloo's thread is inside it: the group is kept until it has timed out, since
destroying a gloo group waits for its threads.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work

SLICE_S = 0.1
"""How often a waiting operation asks whether its generation was broken."""

GRACE_S = 0.25
"""How long an operation of a broken generation may still take to end by itself."""

_NO_TIMEOUT = timedelta(0)

_waited_s = 0.0

_COLLECTIVES = (
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "scatter",
)
_REDUCE_SCATTERS = ("_reduce_scatter_base", "reduce_scatter_single")
_COALESCED_REDUCE_SCATTERS = ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced")
_POINT_TO_POINT = ("send", "recv", "recv_anysource")


def waited() -> float:
    """Seconds that this process has waited for others so far, in operations of whichever group."""
    return _waited_s


class CollectiveFailed(RuntimeError):
    """An operation between ranks failed below Python: how the end of another rank, or of the way to it, is
    felt.
    """


@contextmanager
def _felt() -> Iterator[None]:
    """What gloo raises while an operation is under way is how the collective failed, whatever its words
    are.
    """
    try:
        yield
    except RuntimeError as error:
        raise CollectiveFailed(str(error)) from error


class InterruptibleGroup(dist.ProcessGroup):
    """All of torch's operations on `gloo`; their waits end once `check` raises.

    `check` raises (GroupBroken) after a break and returns otherwise; it is called on the waiting thread.
    """

    def __init__(self, gloo: ProcessGroupGloo, store: Store, check: Callable[[], None]) -> None:
        super().__init__(gloo.rank(), gloo.size())  # pyright: ignore[reportCallIssue]
        self._check = check
        self.answers = False  # at once, and nobody else is asked
        self._unfinished: deque[Work] = deque()
        self._inner = _plain(gloo, store)
        _attach(self, gloo)  # for what is asked about a group, and operations that are not wrapped

    def release(self) -> None:
        """Let go of the group; it is kept in this process as long as gloo is inside an operation."""
        _free_finished()
        if any(not work.is_completed() for work in self._unfinished):
            _keep(self)

    @property
    def finished(self) -> bool:
        """Whether gloo is inside no operation of the group."""
        return all(work.is_completed() for work in self._unfinished)

    def start_collective(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work:
        """One of torch's collectives, by the name of its method."""
        self._check()
        if self.answers:
            return _Answered()
        inner = getattr(self._inner, name)(*args, **kwargs)
        while self._unfinished and self._unfinished[0].is_completed():
            self._unfinished.popleft()
        self._unfinished.append(inner)
        return _Collective(inner, self._check)

    def start_reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], operation: dist.ReduceOp
    ) -> Work:
        """Reduce every input over the group; each output gets its rank's part.

        gloo itself does no more than this: an all-reduce, but one that cannot be waited for in slices.
        """
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        wholes = [tensor.clone() for tensor in inputs]
        works = [self.start_collective("allreduce", ([whole], options), {}) for whole in wholes]
        parts = [whole.chunk(self.size())[self.rank()] for whole in wholes]
        return _ReduceScatter(works, list(zip(outputs, parts, strict=True)))

    def start_transfer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work:
        """One of torch's sends and receives, by the name of its method."""
        self._check()
        if self.answers:
            return _Answered()
        with _felt():
            return _Transfer(getattr(self._inner, name)(*args, **kwargs), self._check)


class _Answered(Work):
    """Of nobody: the tensors stay as they are."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class _Collective(Work):
    """A collective under way. A wait that gives up leaves it as it is, so it can be waited for in slices."""

    def __init__(self, inner: Work, check: Callable[[], None]) -> None:
        super().__init__()
        self._inner = inner
        self._check = check

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        global _waited_s
        patience, began = _Patience(self._check, timeout), time.monotonic()
        try:
            while not self._inner.is_completed():
                try:
                    self._inner.wait(timedelta(seconds=SLICE_S))
                except RuntimeError:
                    if self._inner.is_completed():
                        break
                    patience.spend()
            with _felt():
                return self._inner.wait()
        finally:
            _waited_s += time.monotonic() - began

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> list[torch.Tensor]:
        return self._inner.result()

    def get_future(self) -> Any:
        return self._inner.get_future()


class _ReduceScatter(Work):
    """All-reduces under way, and the parts of their results that are wanted."""

    def __init__(self, works: list[Work], copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._works = works
        self._copies = copies

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        for work in self._works:
            work.wait(timeout)
        for output, part in self._copies:
            output.copy_(part)
        self._copies.clear()
        return True

    def is_completed(self) -> bool:
        return not self._copies


class _Transfer(Work):
    """A send or receive under way. gloo closes all connections if a wait for it gives up, so the wait has a
    thread of its own, which can be left behind."""

    def __init__(self, inner: Work, check: Callable[[], None]) -> None:
        super().__init__()
        self._inner = inner
        self._check = check
        self._ended = threading.Event()
        self._waiter: threading.Thread | None = None
        self._error: Exception | None = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        if self._waiter is None:
            self._waiter = threading.Thread(target=self._wait, daemon=True, name="transfer")
            self._waiter.start()
        global _waited_s
        patience, began = _Patience(self._check, timeout), time.monotonic()
        try:
            while not self._ended.wait(SLICE_S):
                patience.spend()
        finally:
            _waited_s += time.monotonic() - began
        with _felt():
            if self._error is not None:
                raise self._error
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def _source_rank(self) -> int:
        return self._inner._source_rank()

    def _wait(self) -> None:
        try:
            self._inner.wait()
        except RuntimeError as error:
            self._error = error
        finally:
            self._ended.set()


class _Patience:
    """How long one wait may go on: until its own timeout, or a little after a break."""

    def __init__(self, check: Callable[[], None], timeout: timedelta) -> None:
        self._check = check
        self._deadline = time.monotonic() + timeout.total_seconds() if timeout > _NO_TIMEOUT else None
        self._broken_at: float | None = None

    def spend(self) -> None:
        """Raise if the wait must end: CollectiveFailed at its timeout, what `check` raises after a break."""
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            raise CollectiveFailed("gloo operation timed out")
        try:
            self._check()
        except Exception:
            self._broken_at = self._broken_at or now
            if now - self._broken_at >= GRACE_S:
                raise


def _collective(name: str) -> Callable[..., Work]:
    def start(self: InterruptibleGroup, *args: Any, **kwargs: Any) -> Work:
        return self.start_collective(name, args, kwargs)

    return start


def _reduce_scatter(
    self: InterruptibleGroup, output: torch.Tensor, input: torch.Tensor, opts: dist.ReduceScatterOptions
) -> Work:
    return self.start_reduce_scatter([output], [input], opts.reduceOp)


def _coalesced_reduce_scatter(
    self: InterruptibleGroup,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    opts: dist.ReduceScatterOptions,
) -> Work:
    return self.start_reduce_scatter(outputs, inputs, opts.reduceOp)


def _transfer(name: str) -> Callable[..., Work]:
    def start(self: InterruptibleGroup, *args: Any, **kwargs: Any) -> Work:
        return self.start_transfer(name, args, kwargs)

    return start


for _name in _COLLECTIVES:
    setattr(InterruptibleGroup, _name, _collective(_name))
for _name in _REDUCE_SCATTERS:
    setattr(InterruptibleGroup, _name, _reduce_scatter)
for _name in _COALESCED_REDUCE_SCATTERS:
    setattr(InterruptibleGroup, _name, _coalesced_reduce_scatter)
for _name in _POINT_TO_POINT:
    setattr(InterruptibleGroup, _name, _transfer(_name))


def _plain(gloo: ProcessGroupGloo, store: Store) -> dist.ProcessGroup:
    group = dist.ProcessGroup(store, gloo.rank(), gloo.size())
    _attach(group, gloo)
    return group


def _attach(group: dist.ProcessGroup, gloo: ProcessGroupGloo) -> None:
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)


_kept: list[InterruptibleGroup] = []


def _keep(group: InterruptibleGroup) -> None:
    _kept.append(group)
    # Also beyond the end of the interpreter, which would destroy it and wait for its threads.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _free_finished() -> None:
    for group in [group for group in _kept if group.finished]:
        _kept.remove(group)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))
