"""User-code guard: turns what the job's code raises into a UserCodeError with its own traceback."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch

from elastic_train.checkpoint.engine.machine_memory import memory_now
from elastic_train.errors import ConfigError, DeviceFailed, ElasticTrainError, GroupBroken, UserCodeError
from elastic_train.train.collectives.process_group import is_collective_error
from elastic_train.train.device_errors import of_device

NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"  # a RuntimeError of torch
OF_SHARDS = ("mixed torch.Tensor and DTensor", "are out of bounds for storage of size 0")
"""What torch says where a plain tensor meets a parameter that is cut, and where one was freed already."""
_OURS = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


_depth = 0  # of calls into the user's code, which one thread of a process makes


def in_user_code() -> bool:
    """Whether this process is inside the user's code: how long that takes is not for us to judge."""
    return _depth > 0


class UserCodeGuard:
    """Tells errors of the user's code from errors of collectives that run inside it.

    `broken()` says whether this generation was aborted: then any error is a consequence. `silent()` says
    whether it was, and operations end without an error then: what was received may be anything.
    """

    def __init__(
        self,
        *,
        worker: str,
        node: str,
        rank: int,
        generation: int,
        broken: Callable[[], bool],
        silent: Callable[[], bool] = lambda: False,
    ) -> None:
        self._worker, self._node, self._rank = worker, node, rank
        self._generation, self._broken, self._silent = generation, broken, silent

    def at(self, phase: str, step: int) -> _Crossing:
        """A context for calling into the user's code."""
        return _Crossing(self, phase, step, users=True)

    def collective(self, phase: str, step: int) -> _Crossing:
        """A context for our own code that communicates: only what broke the group is translated.

        What the host reads of the outcome it must read inside: only then is it known whether it came.
        """
        return _Crossing(self, phase, step, users=False)

    def heard(self, phase: str, step: int) -> None:
        """GroupBroken where what came may be no outcome."""
        if self._silent():
            raise GroupBroken(generation=self._generation, reason=f"aborted in {phase} of step {step}")

    def translated(self, error: BaseException, phase: str, step: int, users: bool) -> BaseException:
        """What an error that came out of the user's code, or of ours, means."""
        if isinstance(error, GroupBroken):
            return error
        meant = of_device(error)
        if isinstance(meant, DeviceFailed):  # whatever became of the group: this process is in no other
            return meant
        if self._broken() or is_collective_error(error):
            line = (str(error).splitlines() or [type(error).__name__])[0]
            return GroupBroken(generation=self._generation, reason=f"in {phase} of step {step}: {line}")
        if meant is not None:
            return meant
        if NO_MEMORY in str(error):
            return MemoryError(f"{str(error).splitlines()[0]}; {memory_now()}")
        if not users or isinstance(error, ElasticTrainError | MemoryError):
            return error
        if any(said in str(error) for said in OF_SHARDS):
            if phase == "the optimizer":
                return ConfigError(
                    field="task.optimizer",
                    problem=f"{where(error)} takes parameters that are cut and whole ones in one call.",
                    remedy="Update each parameter by itself, or use Parallelism(tp=1).",
                )
            return ConfigError(
                field="parallelism.dp_shard",
                problem=f"{where(error)} uses a parameter while it is sharded: FSDP2 gathers it for a "
                "call of its own module alone.",
                remedy="Call the module instead of using its parameters or another method of it, name a "
                "module that contains both as a unit, in Rules(units=...), or use Parallelism(dp_shard=1).",
            )
        return UserCodeError(
            worker=self._worker,
            rank=self._rank,
            node=self._node,
            step=step,
            phase=phase,
            error=f"{type(error).__name__}: {error}".splitlines()[0],
            traceback=own_traceback(error),
        )


class _Crossing:
    def __init__(self, guard: UserCodeGuard, phase: str, step: int, users: bool) -> None:
        self._guard, self._phase, self._step, self._users = guard, phase, step, users

    def __enter__(self) -> None:
        global _depth
        _depth += self._users

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        global _depth
        _depth -= self._users
        if error is None and not self._users:
            self._guard.heard(self._phase, self._step)
        if error is None or not isinstance(error, Exception | SystemExit):
            return False
        meant = self._guard.translated(error, self._phase, self._step, self._users)
        if meant is error:
            return False
        raise meant from error


def where(error: BaseException) -> str:
    """The line of the job's code that an error comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((_OURS, _TORCH))]
    return f"{own[-1].filename}:{own[-1].lineno} ({own[-1].line})" if own else "the model"


def own_traceback(error: BaseException) -> str:
    """The traceback from the first frame that is neither ours nor torch's."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith((_OURS, _TORCH)):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame or error.__traceback__))
