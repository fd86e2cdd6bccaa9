"""Exceptions that stop a user's loop on purpose; `except Exception` does not catch them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from elastic_train.errors import GroupBroken


class Declared(BaseException):
    """The loop came to its first batch: all that it declares is known."""


class Paused(BaseException):
    """The group was asked to pause at this boundary."""


class Broken(BaseException):
    """The group is broken; the loop is entered again in the next one."""

    def __init__(self, error: GroupBroken) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def aborting() -> Iterator[None]:
    """Around what the engine does inside the loop."""
    try:
        yield
    except GroupBroken as error:
        raise Broken(error) from error
