"""Check where a checkpoint's files lie: in its directory, in its run, or under allowed roots.

A manifest is data. That it names a file is no reason to read it, and a link may lead anywhere.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from elastic_train.checkpoint.validate.manifest_rows import malformed
from elastic_train.checkpoint.validate.state import check_count
from elastic_train.errors import OutsideOfCheckpoint

LOCAL = ("file://", "local://")
_ATTEMPT = r"step-\d{10,}\.g\d+/[^/]+"


class AllowedPlaces:
    """The places of one open checkpoint: `directory` of the store at `root`; `siblings` is the directory of
    the checkpoints of its run, where it was opened as one of a run.
    """

    def __init__(self, root: str, directory: str, *, siblings: str | None = None) -> None:
        self._root, self._directory, self._siblings = root, directory, siblings
        self._local = root.startswith("/")
        self.url = f"{root}/{directory}" if directory else root.rstrip("/")
        self.roots: tuple[str, ...] = ()
        self._checked: set[str] = set()

    def allow(self, roots: Iterable[str]) -> None:
        """Let files under these directories be read too."""
        self.roots = (*self.roots, *(_root(r) for r in roots))

    def all(self) -> tuple[str, ...]:
        """Every directory that files may lie in, as a reader elsewhere has to be allowed to read them."""
        beside = () if self._siblings is None else (f"{self._root}/{self._siblings}",)
        return (*(self._own() if self._local else (self.url, *beside)), *self.roots)

    def check(self, file: str) -> None:
        """OutsideOfCheckpoint unless a file that a manifest names lies in one of the places."""
        if file in self._checked:
            return
        if not _is_path(file):
            plain = not {"", ".", ".."} & set(file.partition("://")[2].split("/"))
            if not plain or not any(file.startswith(f"{root}/") for root in self.roots):
                raise self._outside(file)
        elif file.startswith(("/", *LOCAL)):
            self._check_local(_path(file), file, ())
        else:
            path = posixpath.normpath(posixpath.join(self._directory, file))
            if not self._inside(path):
                raise self._outside(file)
            if self._local:
                self._check_local(posixpath.join(self._root, path), file, self._own())
        self._checked.add(file)

    def _inside(self, path: str) -> bool:
        if path.startswith(("../", "/")) or path in (".", ".."):
            return False
        if not self._directory or path.startswith(f"{self._directory}/"):
            return True
        siblings = self._siblings
        return siblings is not None and re.fullmatch(f"{re.escape(siblings)}/{_ATTEMPT}", path) is not None

    def _own(self) -> tuple[str, ...]:
        """The local directories in which links may end."""
        own = posixpath.join(self._root, self._directory)
        found = [own]
        if self._siblings is not None:
            found.append(posixpath.join(self._root, self._siblings))
        above = Path(own).absolute().parent
        if above.name == "snapshots" and above.parent.name.startswith("models--"):
            found.append(str(above.parent / "blobs"))  # Hugging Face's cache: snapshots are links to blobs
        return tuple(found)

    def _check_local(self, path: str, file: str, own: Sequence[str]) -> None:
        """A regular file that, with all links resolved, lies in one of the places."""
        real = os.path.realpath(path)
        local = (*own, *(root for root in self.roots if _is_path(root)))
        if not any(_under(real, os.path.realpath(place)) for place in local):
            raise self._outside(file)
        try:
            mode = Path(real).stat().st_mode
        except OSError:
            return  # the reader raises what is wrong
        if not stat.S_ISREG(mode):
            raise OutsideOfCheckpoint(url=self.url, problem=f"{file!r:.300} is no regular file.")

    def _outside(self, file: str) -> OutsideOfCheckpoint:
        return OutsideOfCheckpoint(
            url=self.url,
            problem=f"it names {file!r:.300}, which lies outside of it. If that file is meant, allow its "
            "directory: --allow-root DIR, or allow_roots=[DIR].",
        )


def encode_roots(roots: Sequence[str], *, run: str) -> str:
    """Roots as an index records them, for the run that it is in."""
    return json.dumps({"run": run, "roots": list(roots)}, sort_keys=True, ensure_ascii=False)


def recorded_roots(text: str | None, *, run: str, url: str) -> tuple[str, ...]:
    """The roots that were allowed when this index was made in this very run; none in one that was moved or
    copied, whose manifest is then another's word.
    """
    if text is None:
        return ()
    check_count(text.encode(), url=url)
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise malformed(url, "the roots that its manifest records can't be read") from error
    match said:
        case {"run": str(at), "roots": [*roots]} if all(isinstance(r, str) and r for r in roots):
            here = at == run or (
                _is_path(at) and _is_path(run) and os.path.realpath(at) == os.path.realpath(run)
            )
            return tuple(roots) if here else ()
        case _:
            raise malformed(url, "the roots that its manifest records are no list of directories")


def _root(url: str) -> str:
    return str(Path(_path(url)).absolute()) if _is_path(url) else url.rstrip("/")


def _is_path(url: str) -> bool:
    """Whether this is a path of this machine, for us: every URL of another kind is somewhere else."""
    return "://" not in url or url.startswith(LOCAL)


def _path(url: str) -> str:
    """The path that a local URL means."""
    _, split, rest = url.partition("://")
    return "/" + rest.lstrip("/") if split else url


def _under(path: str, place: str) -> bool:
    return path != place and os.path.commonpath([path, place]) == place
