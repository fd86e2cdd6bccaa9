"""Names that are not there, asked for again.

A client of a network file system remembers for up to a minute that a name was not there (nfs(5): `acdirmax`),
whatever others make meanwhile: a controller would not see its own fence. Where a directory is opened, the
client asks its server whether that changed, and looks names up anew if it did.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def asked_again(ask: Callable[[], T], path: Path) -> T:
    """What is asked of a path; FileNotFoundError only if whoever serves it has no such name."""
    try:
        return ask()
    except FileNotFoundError:
        look_again(path)
        return ask()


def look_again(path: Path) -> None:
    """Open every directory that leads to a path, as far as they are there."""
    for place in reversed(path.parents):
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            os.close(os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
