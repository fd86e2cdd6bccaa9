"""Pickle the job for other processes, and name what cannot be pickled, with the remedy."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from ray import cloudpickle

from elastic_train.errors import ConfigError
from elastic_train.train.task import Task

DEPTH = 6
WAY_OUT = (
    "Make it where it is used, in model(), dataset() or loss(), or leave it out of __getstate__: locks, open "
    "files, connections and loggers of one process are nothing for another."
)


def sent(task: Task) -> bytes:
    """The job, pickled by value. ConfigError names the attribute or variable that can't be."""
    error = _problem(task)
    if error is None:
        return cloudpickle.dumps(task)  # pyright: ignore[reportPrivateImportUsage]
    path, thing, error = _culprit(task, "task", error, DEPTH)
    raise ConfigError(
        field=path,
        problem=f"a {type(thing).__name__} cannot be sent to the workers: {error}.",
        remedy=WAY_OUT,
    ) from error


def _problem(thing: object) -> Exception | None:
    try:
        cloudpickle.dumps(thing)  # pyright: ignore[reportPrivateImportUsage]
    except Exception as error:  # noqa: BLE001 - objects say by any error that they can't be pickled
        return error
    return None


def _culprit(thing: object, path: str, error: Exception, depth: int) -> tuple[str, object, Exception]:
    """The innermost part that can't be pickled, by name."""
    for name, part in _parts(thing) if depth else ():
        inner = _problem(part)
        if inner is not None:
            return _culprit(part, f"{path}{name}", inner, depth - 1)
    return path, thing, error


def _parts(thing: object) -> Iterator[tuple[str, Any]]:
    """What an object is made of, as one would write it behind its name."""
    if isinstance(thing, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in thing.items())
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from ((f"[{number}]", value) for number, value in enumerate(thing))
    elif inspect.isfunction(thing):
        used = inspect.getclosurevars(thing)
        yield from ((f": its variable {name}", value) for name, value in used.nonlocals.items())
        yield from ((f": its global {name}", value) for name, value in used.globals.items())
        yield from ((f": its default {number}", d) for number, d in enumerate(thing.__defaults__ or ()))
    elif inspect.ismethod(thing):
        yield ".__self__", thing.__self__
    elif isinstance(thing, type):
        yield from ((f".{name}", value) for name, value in vars(thing).items() if not name.startswith("__"))
    else:
        if hasattr(thing, "func") and hasattr(thing, "args"):  # a partial
            yield from ((f".{name}", getattr(thing, name)) for name in ("func", "args", "keywords"))
        yield from ((f".{name}", value) for name, value in getattr(thing, "__dict__", {}).items())
        yield f" (class {type(thing).__name__})", type(thing)
