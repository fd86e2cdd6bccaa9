"""A file of torch.save is found by its table of contents; only that much of it is read."""

from __future__ import annotations

import io
import random
import shutil
import struct
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_train.checkpoint.importers.deepspeed import open_deepspeed
from elastic_train.checkpoint.importers.torch_file import open_file, open_files
from elastic_train.checkpoint.importers.ucp import open_universal
from elastic_train.checkpoint.importers.zip_index import read_index
from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.errors import CheckpointError, ChecksumMismatch, FormatUnsupported
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.memory_store import MemoryStore
from elastic_train.testing.s3_server import S3Server

pytestmark = pytest.mark.ring1

SCALAR = 8


class Watched:
    """A store that notes which bytes were read."""

    def __init__(self, root: Path) -> None:
        self._inner = open_store(str(root))
        self.ranges: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        return self.read_ranges(path, [(start, length)])[0]

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int | None]]) -> list[bytes]:
        blocks = [self._inner.read(path, start, length) for start, length in ranges]
        self.ranges += [(path, s, s + len(b)) for (s, _), b in zip(ranges, blocks, strict=True)]
        return blocks


def truth(path: Path) -> dict[str, tuple[int, int]]:
    """Entry -> first byte and length, from Python's own reader and the local headers."""
    found = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for info in archive.infolist():
            file.seek(info.header_offset + 26)
            name, extra = struct.unpack("<HH", file.read(4))
            start = info.header_offset + 30 + name + extra
            found[info.filename.partition("/")[2]] = (start, info.file_size)
    return found


@pytest.mark.parametrize(
    ("opener", "directory"),
    [
        (open_deepspeed, "z1/global_step4"),
        (open_deepspeed, "f3/global_step4"),
        (open_universal, "z1/global_step4_u"),
        (open_universal, "p3/global_step2_u"),
    ],
)
def test_opening_reads_no_byte_of_a_tensor(
    deepspeed: Path, opener: Callable[..., Any], directory: str
) -> None:
    store = Watched(deepspeed)
    opener(store, directory)
    assert store.ranges
    tensors = {path: truth(deepspeed / path) for path, _, _ in store.ranges}
    for path, start, stop in store.ranges:
        for entry, (first, size) in tensors[path].items():
            if entry.startswith("data/") and size > SCALAR:
                assert stop <= first or start >= first + size, (path, entry)


def test_places_are_those_of_the_local_headers(deepspeed: Path) -> None:
    store = open_store(str(deepspeed))
    for path in (p for d in ("z1", "f3") for p in sorted((deepspeed / d).rglob("*.pt"))):
        name = path.relative_to(deepspeed).as_posix()
        index, expected = read_index(store, name), truth(path)
        assert index.starts(index.entries) == {k: start for k, (start, _) in expected.items()}


def test_places_are_read_from_headers_where_torch_did_not_write_the_zip(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(100.0)}, tmp_path / "torch.pt")
    with zipfile.ZipFile(tmp_path / "torch.pt") as old, zipfile.ZipFile(tmp_path / "other.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert np.array_equal(open_checkpoint(str(tmp_path / "other.pt"))["w"]["param"][...], np.arange(100.0))


@pytest.mark.parametrize("scheme", ["memory", "s3"])
def test_a_checkpoint_in_an_object_store_opens_and_reads(
    deepspeed: Path, scheme: str, request: pytest.FixtureRequest
) -> None:
    options = None
    url = "memory://foreign/f3"
    if scheme == "s3":
        server: S3Server = request.getfixturevalue("s3")
        options, url = server.options, f"{server.bucket('foreign')}/f3"
    store = open_store(url, options=options)
    for path in (
        "latest",
        *(f"global_step4/{p.name}" for p in (deepspeed / "f3" / "global_step4").iterdir()),
    ):
        store.write(path, (deepspeed / "f3" / path).read_bytes())
    there, here = open_checkpoint(url, options=options), open_checkpoint(str(deepspeed / "f3"))
    assert there.tensors == here.tensors
    assert there.read("emb.weight", "exp_avg").tobytes() == here.read("emb.weight", "exp_avg").tobytes()


def saved(value: Any, **options: Any) -> bytes:
    sink = io.BytesIO()
    torch.save(value, sink, **options)
    return sink.getvalue()


def opened(data: bytes) -> Any:
    store = MemoryStore()
    store.write("x.pt", data)
    return open_file(store, "x.pt")


def repacked(data: bytes, method: int = zipfile.ZIP_STORED, old: bytes = b"", new: bytes = b"") -> bytes:
    """The same entries, with a word changed where it is and sums that say so."""
    sink = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(sink, "w", method) as target:
        for name in source.namelist():
            held = source.read(name)
            target.writestr(name, held.replace(old, new) if old else held)
    return sink.getvalue()


GOOD = saved({"w": torch.arange(50.0)})


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"", ChecksumMismatch, "empty"),
        (GOOD[: len(GOOD) // 2], ChecksumMismatch, "truncated"),
        (GOOD[:-30], ChecksumMismatch, "truncated"),
        (b"not a checkpoint" * 100, FormatUnsupported, "torch.save"),
        (
            saved({"w": torch.zeros(3)}, _use_new_zipfile_serialization=False),
            FormatUnsupported,
            "torch before 1.6",
        ),
        (repacked(GOOD, zipfile.ZIP_DEFLATED), FormatUnsupported, "compressed"),
        (repacked(GOOD, old=b"3\n", new=b"99"), FormatUnsupported, "version is 99.*Upgrade"),
        (repacked(GOOD, old=b"little", new=b"bigend"), FormatUnsupported, "endian"),
        (GOOD.replace(b"3\n", b"99"), ChecksumMismatch, "archive/version in it isn't the one written"),
        (
            GOOD.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"),
            ChecksumMismatch,
            "isn't the one written",
        ),
    ],
)
def test_a_file_that_cannot_be_read_right_is_refused(data: bytes, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        opened(data)


def test_files_without_crc_are_read() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        data = saved({"w": torch.arange(50.0)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert opened(data).tree["w"].shape == (50,)


def test_any_damage_is_a_typed_error_or_does_no_harm(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)  # else nearly every change is found by one sum
    try:
        good = saved({"model": {"w": torch.arange(8.0), "b": torch.ones(2, 3).t()}, "step": 3})
    finally:
        torch.serialization.set_crc32_options(True)
    chance = random.Random(7)
    refused = 0
    path = tmp_path / "x.pt"
    for _ in range(200):
        data = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data[: chance.randint(1, len(data))] if chance.random() < 0.2 else data)
        try:
            checkpoint = open_checkpoint(str(path))
            [checkpoint.read(*name) for name in checkpoint.tensors]
        except CheckpointError:
            refused += 1
    assert refused > 50


def test_a_copy_under_another_name_still_opens(deepspeed: Path, tmp_path: Path) -> None:
    atom = deepspeed / "z1/global_step4_u/zero/emb.weight/fp32.pt"
    shutil.copy(atom, tmp_path / "mine.pt")
    assert isinstance(open_checkpoint(str(tmp_path / "mine.pt")), Checkpoint)


def test_files_of_one_structure_share_it_and_have_numbers_of_their_own(tmp_path: Path) -> None:
    places = {"a.pt": 1.0, "b.pt": 2.0, "other.pt": 3.0}
    for name, number in places.items():
        more = {"more": [name] * 100} if name == "other.pt" else {}
        torch.save(
            {"step": torch.tensor(number), "weight": torch.full((100,), number), **more}, tmp_path / name
        )
    found = open_files(open_store(str(tmp_path)), places)
    assert found["a.pt"].tree is found["b.pt"].tree
    assert found["other.pt"].tree.keys() == {"step", "weight", "more"}
    assert {name: file.scalar(file.tree["step"]) for name, file in found.items()} == places
