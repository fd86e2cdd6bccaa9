"""Walk and delete directory trees.

A directory that can't be listed is an error, never empty: a garbage collector would otherwise delete what
only a reference in there keeps.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

Directory = tuple[Path, list[str], list[str]]
"""A directory, the names of the directories in it, and those of the files."""


def walk(top: Path) -> Iterator[Directory]:
    """Every directory from the top on. What goes away meanwhile, and a top that is none, hold nothing; what
    can't be seen for any other reason raises OSError. Links are not followed.
    """
    left = [top]
    while left:
        directory = left.pop()
        inner: list[str] = []
        names: list[str] = []
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    (inner if _is_directory(entry) else names).append(entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        left.append(directory / entry.name)
        except FileNotFoundError:
            continue
        except NotADirectoryError:
            if directory != top:
                raise
            continue
        yield directory, inner, names


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """A link that leads to itself leads nowhere, as one whose target is gone: it is a name like a file's."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


def unless_gone(
    call: Callable[..., object], path: str, failure: tuple[type[BaseException], BaseException, TracebackType]
) -> None:
    """For `shutil.rmtree`: another deleter took it, or a late writer came between listing and removing."""
    if not isinstance(failure[1], FileNotFoundError):
        raise failure[1]
