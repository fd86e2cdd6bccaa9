"""Whether a job's code gives the same on another rank, in another process, and with other gradients held.

Where it names what a rank is called or how many there are, its environment or the gradients of parameters,
it is called once more and told otherwise. To look is fine: a run is refused where what comes out differs.
"""

from __future__ import annotations

import functools
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode

from elastic_train.errors import ConfigError
from elastic_train.train.collectives.process_group import is_collective_error
from elastic_train.train.model.surroundings import Surroundings, is_own_module

_RANK, _SIZE = 1, 2
_TOLD: tuple[tuple[ModuleType, str, Callable[[Any], Any]], ...] = (
    *((module, "get_rank", lambda rank: rank + _RANK) for module in (dist, distributed_c10d)),
    *((module, "get_world_size", lambda size: size + _SIZE) for module in (dist, distributed_c10d)),
    *((module, "get_node_local_rank", lambda rank: rank + _RANK) for module in (dist, distributed_c10d)),
    *((module, "is_initialized", lambda _: True) for module in (dist, distributed_c10d)),
    (os, "getpid", lambda pid: pid + _RANK),
    (os, "getppid", lambda pid: pid + _RANK),
    (socket, "gethostname", lambda name: f"{name}-other"),
    (platform, "node", lambda name: f"{name}-other"),
)
"""What tells one process from another, and what it would say elsewhere."""
_WITHOUT_A_GROUP = {"get_rank": 0, "get_world_size": 1, "get_node_local_rank": 0}
_TALKS = tuple(
    name
    for name in vars(dist)
    if name.startswith(("all_reduce", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter"))
    and callable(getattr(dist, name))
)
_READ: Any = torch.Tensor.grad.__get__  # type: ignore[attr-defined]
_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "HOSTNAME")
_NAMES = frozenset({*(name for _, name, _ in _TOLD), *_TALKS, "environ", "getenv"})


class _Talks(Exception):
    """The job's code called a collective of its own."""


def check_elsewhere(
    surroundings: Surroundings,
    first: Sequence[torch.Tensor],
    call: Callable[[], list[torch.Tensor]],
    alike: Callable[[Sequence[Any], Sequence[Any]], bool],
    *,
    field: str,
    what: str,
) -> None:
    """ConfigError where `call` does not give `first` elsewhere. All ranks call it together."""
    if _NAMES & surroundings.read:
        asked, talks = set[str](), ""
        try:
            with _elsewhere(surroundings, asked):
                same = alike(first, call())
        except _Talks as error:
            same, talks = False, str(error)
        except Exception as error:  # it runs where it is: that it does not elsewhere is what is asked
            if is_collective_error(error):
                raise
            same = False
        if not same:
            said = f"it calls {talks} itself" if talks else f"it asks for {', '.join(sorted(asked))}"
            raise ConfigError(
                field=field,
                problem=f"{what} gives another value on another rank or machine: {said}. Which rank computes "
                "a micro-batch, and how many there are, depends on the plan.",
                remedy="Compute it from the samples alone.",
            )
    if "grad" in surroundings.read:
        with _OtherGradients():
            same = alike(first, call())
        if not same:
            raise ConfigError(
                field=field,
                problem=f"{what} reads the gradients of parameters, which are those of the micro-batches "
                "that a rank had before it.",
                remedy="Read them in a hook of the optimizer's step (register_step_pre_hook): there they are "
                "those of the global batch.",
            )


@contextmanager
def _elsewhere(surroundings: Surroundings, asked: set[str]) -> Iterator[None]:
    """The job's own code is told what it would be on another rank, libraries are not. `asked` gets for what
    it asked."""
    replaced: list[tuple[Any, str, Any]] = []
    told: list[tuple[ModuleType, str, Any]] = [
        (module, name, _otherwise(getattr(module, name), name, change, asked))
        for module, name, change in _TOLD
    ]
    told += [
        (module, name, _refusing(getattr(module, name), name))
        for module in (dist, distributed_c10d)
        for name in _TALKS
        if hasattr(module, name)
    ]
    told += [(os, "environ", _Environment(vars(os)["environ"], asked))]
    by_id = {id(getattr(module, name)): other for module, name, other in told}
    try:
        for module, name, other in told:
            replaced.append((vars(module), name, getattr(module, name)))
            setattr(module, name, other)
        for held in surroundings.globals():
            for name, value in list(held.items()):  # imported by name
                if id(value) in by_id:
                    replaced.append((held, name, value))
                    held[name] = by_id[id(value)]
        yield
    finally:
        for held, name, value in reversed(replaced):
            held[name] = value


class _Environment(dict[str, str]):
    """The variables of another process."""

    def __init__(self, own: Mapping[str, str], asked: set[str]) -> None:
        super().__init__(own)
        self._asked = asked
        for name in _VARIABLES:
            super().__setitem__(name, str(_RANK + 6))

    def __getitem__(self, name: str) -> str:
        self._asked.add(f"os.environ[{name!r}]")
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._asked.add(f"os.environ[{name!r}]")
        return super().get(name, default)


def _otherwise(
    real: Callable[..., Any], name: str, change: Callable[[Any], Any], asked: set[str]
) -> Callable[..., Any]:
    @functools.wraps(real)
    def other(*args: Any, **kwargs: Any) -> Any:
        if not _asked_by_the_job():
            return real(*args, **kwargs)
        asked.add(f"{name}()")
        grouped = name not in _WITHOUT_A_GROUP or dist.is_initialized()
        return change(real(*args, **kwargs) if grouped else _WITHOUT_A_GROUP[name])

    return other


def _refusing(real: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(real)
    def other(*args: Any, **kwargs: Any) -> Any:
        if _asked_by_the_job():
            raise _Talks(f"torch.distributed.{name}")
        return real(*args, **kwargs)

    return other


def _asked_by_the_job() -> bool:
    name = sys._getframe(2).f_globals.get("__name__")
    return isinstance(name, str) and is_own_module(name)


class _OtherGradients(TorchFunctionMode):
    """The job's own code finds ones where it reads the gradient of a parameter, cut or gathered."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == _READ and isinstance(args[0], nn.Parameter) and _asked_by_the_job():
            return torch.ones_like(args[0].detach())
        return func(*args, **(kwargs or {}))
