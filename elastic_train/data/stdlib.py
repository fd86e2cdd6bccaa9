"""The standard library's own source as text: data that every machine already has."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elastic_train.data.listing import SourceFile

EXCLUDED = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StandardLibrary:
    """The .py files of the running interpreter's standard library, without its tests, sorted by name.

    With `max_bytes` only as many of the first files as stay below it. Interpreters of different versions have
    different files; the identity of the data shows it.
    """

    max_bytes: int | None = None

    def files(self) -> tuple[SourceFile, ...]:
        root = Path(sysconfig.get_path("stdlib"))
        chosen: list[SourceFile] = []
        total = 0
        for name in sorted(path.relative_to(root).as_posix() for path in _modules(root)):
            size = (root / name).stat().st_size
            total += size
            if self.max_bytes is not None and total > self.max_bytes:
                break
            chosen.append(SourceFile(name=name, url=str(root / name), size=size))
        return tuple(chosen)


def _modules(directory: Path) -> Iterator[Path]:
    for path in directory.iterdir():
        if path.suffix == ".py" and path.is_file():
            yield path
        elif path.name not in EXCLUDED and path.is_dir() and not path.is_symlink():
            yield from _modules(path)
