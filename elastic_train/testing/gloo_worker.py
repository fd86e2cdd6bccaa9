"""The loop of one pool process: calls on the main thread, control calls on a second one."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from elastic_train.testing.rehearsal import communicator
from elastic_train.testing.rehearsal import device as rehearsal

READY = -1
"""Number of the first answer, which no call asked for."""

_importing = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCall:
    """A function by where it is defined, so that a process that never saw the module can import it."""

    module: str
    file: str
    qualname: str

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> NamedCall:
        assert "<locals>" not in fn.__qualname__, f"{fn.__qualname__} is not importable by name"
        return cls(module=fn.__module__, file=fn.__code__.co_filename, qualname=fn.__qualname__)

    def load(self) -> Callable[..., Any]:
        with _importing:
            found: Any = sys.modules.get(self.module) or self._import()
        for part in self.qualname.split("."):
            found = getattr(found, part)
        return found

    def _import(self) -> Any:
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError:
            spec = importlib.util.spec_from_file_location(self.module, Path(self.file))
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[self.module] = module
            spec.loader.exec_module(module)
            return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a function, with the process's state in front of its arguments."""

    number: int
    fn: NamedCall
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    error: str  # type and message
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    exitcode: int | None


Outcome = Returned | Raised | Died


def serve(index: int, work: Connection, control: Connection, device: str) -> None:
    """Answer calls until the pool closes its end; then end at once, whatever other threads still do."""
    torch.set_num_threads(1)
    faulthandler.enable()
    if device == rehearsal.NAME:
        rehearsal.load()
        communicator.register()
    elif device != "cpu":
        torch.accelerator.set_device_index(index % torch.accelerator.device_count())
    state: dict[str, Any] = {"index": index, "device": device}
    work.send((READY, Returned(value=None)))
    threading.Thread(target=_answer, args=(control, state), daemon=True).start()
    _answer(work, state)
    os._exit(0)


def _answer(calls: Connection, state: dict[str, Any]) -> None:
    while True:
        try:
            call: Call = calls.recv()
        except (EOFError, OSError):
            return
        calls.send((call.number, _perform(call, state)))


def _perform(call: Call, state: dict[str, Any]) -> Outcome:
    try:
        return Returned(value=call.fn.load()(state, *call.args))
    except Exception as error:  # noqa: BLE001 - whatever the function raised is the outcome of the call
        return Raised(error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
