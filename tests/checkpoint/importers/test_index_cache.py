"""The index of another system's checkpoint is kept and used again, and never believed."""

from __future__ import annotations

import os
import random
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_train.checkpoint.checksums import digest
from elastic_train.checkpoint.importers import index_cache
from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.errors import ElasticTrainError

pytestmark = pytest.mark.ring1

OLD = 1_700_000_000


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(index_cache, "TICK_NS", -(10**12))
    before = index_cache.keep_indexes_in(tmp_path / "cache")
    yield tmp_path / "cache"
    index_cache.keep_indexes_in(before)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).parents[2] / "fixtures/deepspeed_zero_tiny.tar.gz") as archive:
        archive.extractall(tmp_path / "fixtures", filter="data")
    return tmp_path / "fixtures/p1"


def content(checkpoint: Checkpoint) -> tuple[object, ...]:
    table = checkpoint.manifest.table
    return table.to_pylist(), checkpoint.document, checkpoint.aliases, checkpoint.files.url


def refuse(*_: object) -> None:
    raise AssertionError("it is built anew")


def used(source: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """The checkpoint, whose index must not be built again."""
    with monkeypatch.context() as patch:
        patch.setattr("elastic_train.checkpoint.importers.detect._import", refuse)
        return open_checkpoint(str(source))


def test_an_index_is_built_once_and_is_the_same(
    source: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(path for path in source.rglob("*"))
    first = open_checkpoint(str(source))
    again = used(source, monkeypatch)
    assert content(again) == content(first)
    name = ("emb.weight", "exp_avg")
    assert again.read(*name).tobytes() == first.read(*name).tobytes()
    assert len(list(kept.iterdir())) == 1
    assert kept.stat().st_mode & 0o777 == 0o700
    assert sorted(path for path in source.rglob("*")) == before
    (tag,) = source.glob("global_step?")
    assert content(open_checkpoint(str(tag))) == content(first)


def rewritten_in_place(source: Path) -> None:
    """With its size, and its times set back."""
    path = next(source.rglob("zero_pp_rank_0*_optim_states.pt"))
    found = path.stat()
    with path.open("r+b") as file:
        file.seek(found.st_size // 2)
        file.write(b"x")
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def another_in_its_place(source: Path) -> None:
    path = next(source.rglob("zero_pp_rank_0*_optim_states.pt"))
    shutil.copy2(path, source / "new")
    (source / "new").replace(path)


def gone(source: Path) -> None:
    next(source.rglob("mp_rank_00_model_states.pt")).unlink()


def one_more(source: Path) -> None:
    path = next(source.rglob("zero_pp_rank_0*_optim_states.pt"))
    shutil.copy(path, path.with_name(path.name.replace("rank_0_", "rank_7_")))


def pointer(source: Path) -> None:
    (source / "latest").write_text("elsewhere")


@pytest.mark.parametrize("change", [rewritten_in_place, another_in_its_place, gone, one_more, pointer])
def test_a_source_that_changed_is_looked_at_again(
    source: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    open_checkpoint(str(source))
    change(source)
    with pytest.raises(AssertionError, match="anew"):
        used(source, monkeypatch)


def test_what_changed_a_moment_ago_is_not_kept(
    source: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_cache, "TICK_NS", 3600 * 10**9)
    open_checkpoint(str(source))
    assert not list(kept.iterdir())


def test_a_source_that_changes_while_it_is_read_is_not_kept(
    source: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = index_cache.IndexCache.keep

    def late(cache: index_cache.IndexCache, found: object) -> None:
        another_in_its_place(source)
        build(cache, found)  # type: ignore[arg-type]

    monkeypatch.setattr(index_cache.IndexCache, "keep", late)
    open_checkpoint(str(source))
    assert not kept.exists()


def test_any_damage_to_a_kept_index_only_costs_its_building(source: Path, kept: Path) -> None:
    right = content(open_checkpoint(str(source)))
    (file,) = kept.iterdir()
    data = file.read_bytes()
    drawn = random.Random(0)
    for number in range(30):
        damaged = bytearray(data)
        if number % 3 == 0:
            del damaged[drawn.randrange(len(damaged)) :]
        elif number % 3 == 1:
            damaged[drawn.randrange(len(damaged))] ^= 1 << drawn.randrange(6)
        else:
            at = drawn.randrange(len(damaged))
            damaged[at : at + drawn.randrange(64)] = drawn.randbytes(drawn.randrange(64))
        file.write_bytes(damaged)
        assert content(open_checkpoint(str(source))) == right, number
        assert file.read_bytes() == data


def test_a_kept_index_with_right_sums_is_checked_like_any_manifest(source: Path, kept: Path) -> None:
    open_checkpoint(str(source))
    (file,) = kept.iterdir()
    data = file.read_bytes()
    start = len(index_cache.FORMAT) + 32
    drawn = random.Random(1)
    for _ in range(60):
        body = bytearray(data[start:])
        for _ in range(drawn.choice((1, 1, 2, 8))):
            body[drawn.randrange(len(body))] = drawn.choice((0, 255, drawn.randrange(256)))
        file.write_bytes(index_cache.FORMAT + digest(bytes(body)).encode() + body)
        try:
            found = open_checkpoint(str(source))
            for name in list(found.tensors)[:3]:
                found.read(*name)
        except ElasticTrainError:
            file.write_bytes(data)


def test_files_outside_of_the_source_are_not_read(source: Path, kept: Path, tmp_path: Path) -> None:
    first = open_checkpoint(str(source))
    (file,) = kept.iterdir()
    name = first.manifest.strings("file")[0]
    (tmp_path / "secret").write_bytes(b"secret" * 1000)
    outside = os.path.relpath(tmp_path / "secret", source / "global_step4").ljust(len(name), "/")
    body = file.read_bytes()[len(index_cache.FORMAT) + 32 :]
    body = body.replace(name.encode(), outside.encode()[: len(name)])
    file.write_bytes(index_cache.FORMAT + digest(body).encode() + body)
    assert content(open_checkpoint(str(source))) == content(first)


def test_the_kept_indexes_are_bounded(source: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_checkpoint(str(source))
    (file,) = kept.iterdir()
    monkeypatch.setattr(index_cache, "MOST", 4 * file.stat().st_size)
    for number in range(6):
        shutil.copytree(source, source.with_name(f"copy{number}"))
        open_checkpoint(str(source.with_name(f"copy{number}")))
    assert len(list(kept.iterdir())) in (3, 4)
    (kept / ".left.0000").write_bytes(b"x")
    os.utime(kept / ".left.0000", (OLD, OLD))
    monkeypatch.setattr(index_cache, "LARGEST", 100)
    for path in kept.iterdir():
        os.utime(path, (OLD, OLD))
    open_checkpoint(str(source))  # too large to be kept or read
    assert time.time() - max(path.stat().st_mtime for path in kept.iterdir()) > 10**6


@pytest.mark.parametrize("why", ["none", "unwritable", "others"])
def test_where_nothing_can_be_kept_nothing_fails(
    source: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "none":
        index_cache.keep_indexes_in(None)
    elif why == "unwritable":
        kept.write_text("a file")
    else:
        kept.mkdir(parents=True)
        kept.chmod(0o777)
    assert len(open_checkpoint(str(source))) > 10
    assert not kept.is_dir() or not list(kept.iterdir())
