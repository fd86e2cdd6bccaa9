"""Files of this machine below a place, links followed: a link to a file is that file, under the link's name.

A place is a path first. Only where nothing is there it is a pattern, and then only in the part that isn't.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from fsspec.utils import glob_translate

from elastic_train.errors import ConfigError

Identity = tuple[int, int]
"""Device and number of a directory."""


def local_files(place: str, suffixes: tuple[str, ...]) -> tuple[str, dict[str, int]]:
    """The directory that names begin below, and the size of each file by its path.

    Directories are narrowed to names that end in one of `suffixes`. ConfigError for what is there and can't
    be read.
    """
    path = existing(place)
    if path is None:
        root, pattern = _parts(_home(place).absolute())
        found = [str(file) for file in _matching(root, pattern)] if pattern else []
    elif path.is_dir():
        root = path
        found = [str(file) for file in _walk(path) if file.name.endswith(suffixes)]
    else:
        root, found = path.parent, [str(path)]
    sizes = ((file, _size(Path(file))) for file in found)
    return str(root), {file: size for file, size in sizes if size is not None}


def existing(place: str) -> Path | None:
    """The absolute path of what is there under this very name, or under that of a home directory."""
    for path in (Path(place), _home(place)):
        if path.is_symlink() or path.exists():
            return path.absolute()
    return None


def _home(place: str) -> Path:
    try:
        return Path(place).expanduser()
    except RuntimeError:  # no such user
        return Path(place)


def _parts(pattern: Path) -> tuple[Path, str]:
    """The longest directory that is there, and the pattern below it; "" where it is none."""
    literal, rest = pattern, list[str]()
    while not literal.is_dir():
        rest.insert(0, literal.name)
        literal = literal.parent
    below = "/".join(rest)
    return literal, below if any(mark in below for mark in "*?[") else ""


def _matching(root: Path, pattern: str) -> Iterator[Path]:
    """With `**` through links too, which Path.glob does not follow and glob.glob follows in circles."""
    if "**" not in pattern:
        return root.glob(pattern)
    matches = re.compile(glob_translate(pattern)).fullmatch
    return (file for file in _walk(root) if matches(str(file.relative_to(root))))


def _walk(root: Path) -> Iterator[Path]:
    """All files below a directory but hidden ones, links to directories followed, but not in circles."""
    above: dict[str, frozenset[Identity]] = {str(root): frozenset()}
    for directory, folders, files in os.walk(root, onerror=_refuse, followlinks=True):
        own = above.pop(directory) | {_identity(Path(directory))}
        at = Path(directory)
        folders[:] = [f for f in folders if not f.startswith(".") and _identity(at / f) not in own]
        above |= {os.path.join(directory, folder): own for folder in folders}  # noqa: PTH118 - as os.walk does it
        yield from (at / file for file in files if not file.startswith("."))


def _identity(directory: Path) -> Identity:
    try:
        there = directory.stat()
    except OSError as error:
        raise _refused(error) from error
    return there.st_dev, there.st_ino


def _refuse(error: OSError) -> None:
    raise _refused(error) from error


def _refused(error: OSError) -> ConfigError:
    return ConfigError(
        field="data",
        problem=f"{error.filename} cannot be listed: {error.strerror}.",
        remedy="What can't be seen is not left out: give the workers the right to read it.",
    )


def _size(path: Path) -> int | None:
    """Of a file; None for what is none. ConfigError for a link that leads nowhere."""
    try:
        there = path.stat()
    except OSError as error:
        target = f", a link to {path.readlink()}," if path.is_symlink() else ""
        raise ConfigError(
            field="data",
            problem=f"{path}{target} cannot be read: {error.strerror}.",
            remedy="Restore what it leads to on every node, or remove it.",
        ) from error
    return there.st_size if stat.S_ISREG(there.st_mode) else None
