"""What a directory must do beyond the contract: order of system calls, modes, races of other nodes, full
devices.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from elastic_train.errors import StorageError, StorageNotFound, StorageUnavailable
from elastic_train.storage.posix_store import PosixStore
from elastic_train.storage.preflight import probe
from elastic_train.storage.retry import Backoff, Retry

pytestmark = pytest.mark.ring1

CALLS = ("write", "fsync", "link", "replace")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the system calls that were really made, in order."""
    seen: list[str] = []
    for name in CALLS:
        real = getattr(os, name)

        def record(*args: object, name: str = name, real=real) -> object:
            directory = name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode)
            seen.append(f"{name} directory" if directory else name)
            return real(*args)

        monkeypatch.setattr(os, name, record)
    return seen


def test_bytes_are_durable_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, calls: list[str]
) -> None:
    store = PosixStore(tmp_path)
    store.write("a", b"x")
    assert calls == ["write", "fsync", "replace", "fsync directory"]
    calls.clear()
    store.create("b", b"x")
    assert calls == ["write", "fsync", "link", "fsync directory"]
    calls.clear()
    with store.stream("c") as sink:
        sink.write(b"x")
        sink.write(b"y")
    assert calls == ["write", "write", "fsync", "replace", "fsync directory"]


def test_a_file_system_that_cannot_flush_directories_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsync(2) says EINVAL then; of a file it is an error still."""
    real, refused = os.fsync, [stat.S_ISDIR]

    def fsync(file: int) -> None:
        if any(kind(os.fstat(file).st_mode) for kind in refused):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    store = PosixStore(tmp_path)
    store.write("new/a", b"x")
    store.create("new/b", b"y")
    assert store.list() == ["new/a", "new/b"]
    refused.append(stat.S_ISREG)
    with pytest.raises(StorageError, match="Invalid argument"):
        store.write("new/c", b"z")
    assert store.list() == ["new/a", "new/b"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_hard_links_is_refused_and_said(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StorageError, match="A commit needs hard links"):
        probe(PosixStore(tmp_path))
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_a_new_directory_is_durable_in_its_parent(tmp_path: Path, calls: list[str]) -> None:
    PosixStore(tmp_path).write("new/a", b"x")
    assert calls == ["fsync directory", "write", "fsync", "replace", "fsync directory"]


@pytest.mark.parametrize(("mask", "file", "directory"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
def test_modes_follow_the_umask(tmp_path: Path, mask: int, file: int, directory: int) -> None:
    store = PosixStore(tmp_path / "run")
    before = os.umask(mask)
    try:
        store.write("d/a", b"x")
        store.create("d/b", b"x")
        with store.stream("d/c") as sink:
            sink.write(b"x")
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "run").rglob("*")}
    assert modes == {"d": directory, "a": file, "b": file, "c": file}


def test_a_directory_that_another_node_makes_first_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = Path.mkdir, set[Path]()

    def mkdir(self: Path, *args: object, **kwargs: object) -> None:
        if self not in refused:  # as a network file system says it before the directory can be seen
            refused.add(self)
            raise FileExistsError(errno.EEXIST, "File exists", str(self))
        real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    PosixStore(tmp_path / "run").write("d/a", b"x")
    assert refused == {tmp_path / "run", tmp_path / "run/d"}
    assert (tmp_path / "run/d/a").read_bytes() == b"x"


@pytest.mark.parametrize("call", ["write", "create", "stream"])
def test_a_directory_that_was_there_and_is_gone_is_waited_for_and_not_made_again(
    tmp_path: Path, call: str
) -> None:
    root, away = tmp_path / "run", tmp_path / "away"
    PosixStore(root).write("d/a", b"x")
    store, waits = PosixStore(root), list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            away.rename(root)

    store.retry = Retry(sleep=sleep)
    root.rename(away)
    if call == "stream":
        with store.stream("d/b") as sink:
            sink.write(b"x")
    else:
        getattr(store, call)("d/b", b"x")
    assert len(waits) == 3
    assert store.list() == ["d/a", "d/b"]
    root.rename(away)
    store.retry = Retry(Backoff(attempts=2), sleep=lambda _: None)
    with pytest.raises(StorageUnavailable, match="is gone: it was deleted or moved away"):
        store.write("c", b"x")
    assert not root.exists()


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that takes 1000 bytes per call and 3000 in all."""
    real, left = os.write, [3000]

    def write(file: int, data: memoryview) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = real(file, data[: min(1000, left[0])])
        left[0] -= done
        return done

    monkeypatch.setattr(os, "write", write)


def test_short_writes_go_on_and_a_full_device_leaves_nothing(tmp_path: Path, small_limit: None) -> None:
    store = PosixStore(tmp_path)
    store.write("a", bytes(range(200)) * 12)
    assert store.read("a") == bytes(range(200)) * 12
    with pytest.raises(StorageError, match="No space left"):
        store.write("a", bytes(2000))
    with pytest.raises(StorageError, match="No space left"), store.stream("b") as sink:
        sink.write(bytes(2000))
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert store.size("a") == 2400


def test_what_a_killed_writer_left_is_seen_only_as_unfinished(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from elastic_train.storage.posix_store import PosixStore\n"
        "with PosixStore(Path(sys.argv[1])).stream('d/a') as sink:\n"
        "    sink.write(bytes(5000)); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    (tmp_path / "empty").mkdir()
    store = PosixStore(tmp_path)
    assert store.list() == []
    left = store.unfinished()
    assert [p.partition("/")[0] for p in left] == ["d", "empty"]
    for path in left:
        store.delete_tree(path.partition("/")[0])
    assert list(tmp_path.iterdir()) == []


def test_only_what_is_unfinished_is_discarded(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    store.write("d/a", b"1")
    (tmp_path / "d" / ".tmp-1").write_bytes(b"2")
    (tmp_path / "d" / ".tmp-2").write_bytes(b"3")
    store.discard(["d/.tmp-1", "d/a", "d", "d/.tmp-gone"])
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == [".tmp-2", "a"]


@pytest.mark.parametrize(("call", "system"), [("create", "link"), ("write", "replace")])
def test_a_writer_whose_unfinished_file_is_swept_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, system: str
) -> None:
    store = PosixStore(tmp_path)
    real = getattr(os, system)
    swept: list[str] = []

    def sweep_first(*args: object) -> object:
        if not swept:
            swept.extend(store.unfinished())
            store.discard(swept)
        return real(*args)

    monkeypatch.setattr(os, system, sweep_first)
    getattr(store, call)("d/a", b"x")
    assert len(swept) == 1
    assert store.read("d/a") == b"x"
    assert store.unfinished() == []


def test_what_was_published_is_not_published_again_where_its_directory_goes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, link, links = PosixStore(tmp_path / "run"), os.link, list[object]()
    store.write("a", b"x")

    def link_and_lose(source: Path, target: Path) -> None:
        links.append(target)
        link(source, target)
        shutil.rmtree(tmp_path / "run" / "d")

    monkeypatch.setattr(os, "link", link_and_lose)
    with pytest.raises(StorageError):
        store.create("d/a", b"x")
    assert len(links) == 1


def test_a_directory_is_looked_into_without_what_is_inside(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    for name in ("top/a", "top/dark/b"):
        store.write(name, b"x")
    (tmp_path / "top" / "loop").symlink_to(tmp_path / "top")
    (tmp_path / "top" / ".tmp-1").write_bytes(b"")
    (tmp_path / "top" / "dark").chmod(0)
    assert store.names("top") == ["a"]
    (tmp_path / "top" / "dark").chmod(0o700)
    assert store.names("top/dark") == ["b"]


@pytest.mark.parametrize("call", ["read", "read_ranges", "read_into"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, call: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    store = PosixStore(tmp_path)
    arguments = {"read": (), "read_ranges": ([(0, 1)],), "read_into": (0, [memoryview(bytearray(1))])}[call]
    with pytest.raises(StorageError, match="no regular file"):
        getattr(store, call)("pipe", *arguments)


class RemembersAbsence:
    """Names as a client of NFS has them: one that was not there stays so until its directory is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._absent: set[str] = set()
        for name in ("open", "stat", "scandir"):
            monkeypatch.setattr(os, name, self._remembering(name, getattr(os, name)))

    def _remembering(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *more: Any, **named: Any) -> Any:
            asked = os.fspath(path)
            leading = [asked, *map(str, Path(asked).parents)]
            if self._absent & {*leading}:
                raise FileNotFoundError(errno.ENOENT, "as it was", asked)
            try:
                found = real(path, *more, **named)
            except FileNotFoundError:
                self._absent |= {next(one for one in reversed(leading) if not os.path.lexists(one))}
                raise
            if name != "stat" and Path(asked).is_dir():
                self._absent = {one for one in self._absent if str(Path(one).parent) != asked}
            return found

        return call


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("call", ["read", "exists", "size", "list", "names"])
def test_what_another_host_wrote_is_seen_though_it_was_not_there_a_moment_ago(
    call: str, deep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "runs/run/commits/00000001.json" if deep else tmp_path / "runs/run/lease.json"
    if not deep:
        file.parent.mkdir(parents=True)
    RemembersAbsence(monkeypatch)
    store = PosixStore(tmp_path / "runs" / "run")
    name = file.relative_to(store.root).as_posix()
    looks: dict[str, Callable[[], Any]] = {
        "read": lambda: store.read(name),
        "exists": lambda: store.exists(name),
        "size": lambda: store.size(name),
        "list": lambda: store.list("commits" if deep else ""),
        "names": lambda: store.names("commits" if deep else ""),
    }
    with suppress(StorageNotFound):
        assert not looks[call]()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x")
    assert looks[call]()
