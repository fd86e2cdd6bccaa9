"""Damage is found, named, and never hides an older sound checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from elastic_train.checkpoint.account import account
from elastic_train.checkpoint.checksums import page_bytes
from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.lazy_arrays import TensorInfo
from elastic_train.checkpoint.manifest import Manifest
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.verify import verify
from elastic_train.checkpoint.writer import WrittenPart, write_part
from elastic_train.errors import (
    ChecksumMismatch,
    FormatUnsupported,
    FragmentMissing,
    Malformed,
    StorageError,
    TensorMismatch,
)
from elastic_train.geometry.box import Box
from elastic_train.recovery.evidence import Stored
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.memory_store import MemoryStore
from elastic_train.storage.store import Store
from elastic_train.testing.faulty_store import Fail, FaultyStore, Full

pytestmark = pytest.mark.ring1

Cut = Callable[..., Piece]
Save = Callable[..., Stored]


def flip(store: Store, path: str, byte: int) -> None:
    data = bytearray(store.read(path))
    data[byte] ^= 4
    store.write(path, data)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(open_store(str(tmp_path / "run")))


def test_a_flipped_bit_is_found_named_and_costs_one_checkpoint(run: RunDirectory, save: Save) -> None:
    term = run.begin_term("a")
    older, newer = save(run, term=term, step=2), save(run, term=term, step=4)
    row = next(
        r for r in map(Checkpoint.of(run, newer).manifest.row, range(3)) if r.box == Box((4, 0), (2, 4))
    )
    flip(run.store, f"{newer.path}/{row.file}", row.byte_offset + 5)
    damaged = Checkpoint.of(run, newer)
    assert damaged.read("w", "param", Box((0, 0), (4, 4))).sum() == 4 * 16  # what is sound is still read
    first, last = row.byte_offset, row.byte_offset + 32
    where = rf"{first} to {last} of w00001.safetensors.*page 0 of w \(param\) \[4:6,0:4\]"
    with pytest.raises(ChecksumMismatch, match=where):
        damaged.read("w", "param")
    report = verify(damaged)
    assert not report.sound
    assert len(report.problems) == 1
    assert "w00001.safetensors" in report.problems[0]
    assert run.before(newer) == older
    assert verify(Checkpoint.of(run, older)).sound


def test_the_damaged_page_of_many_is_named_with_its_elements(cut: Cut) -> None:
    store, array = MemoryStore(), np.zeros(1 << 21, dtype=np.int32)
    page = page_bytes(array.nbytes)
    assemble(store, "c", [write_part(store, "c", 0, [cut("w", array)])], {})
    checkpoint = Checkpoint.open(store, "c")
    start = checkpoint.manifest.row(0).byte_offset
    flip(store, "c/w00000.safetensors", start + page + 9)
    with pytest.raises(ChecksumMismatch, match=f"page 1 of w .* elements {page // 4} to {page // 2} "):
        checkpoint.read("w", "param")
    assert checkpoint.read("w", "param", Box((0,), (page // 4,))).sum() == 0


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_missing_or_short_file_is_named_with_what_it_held(
    run: RunDirectory, save: Save, damage: str
) -> None:
    stored = save(run, term=run.begin_term("a"), step=2)
    path = f"{stored.path}/w00001.safetensors"
    data = run.store.read(path)
    if damage == "gone":
        run.store.delete([path])
    else:
        run.store.write(path, data[:-1])
    checkpoint = Checkpoint.of(run, stored)
    with pytest.raises(FragmentMissing, match=r"w00001.safetensors .*w \(param\) \[4:6,0:4\]"):
        checkpoint.read("w", "param")
    assert not verify(checkpoint).sound


@pytest.mark.parametrize("name", ["manifest.parquet", "state.json"])
def test_a_changed_or_missing_description_is_never_opened(run: RunDirectory, save: Save, name: str) -> None:
    stored = save(run, term=run.begin_term("a"), step=2)
    path = f"{stored.path}/{name}"
    good = run.store.read(path)
    for byte in (3, len(good) // 2, len(good) - 1):
        flip(run.store, path, byte)
        with pytest.raises(ChecksumMismatch, match=name):
            Checkpoint.of(run, stored)
        run.store.write(path, good)
    run.store.delete([path])
    with pytest.raises(FragmentMissing, match=name):
        Checkpoint.of(run, stored)


def test_a_manifest_of_a_newer_format_is_refused(cut: Cut) -> None:
    manifest = Manifest.of([])
    newer = Manifest(table=manifest.table, fragments=manifest.fragments, extra={"version": "2"})
    with pytest.raises(FormatUnsupported, match="version 2"):
        Manifest.decode(newer.encode(), url="x")
    with pytest.raises(Malformed, match="can't be read"):
        Manifest.decode(b"not parquet", url="x")


def test_fragments_that_do_not_tile_are_not_assembled(cut: Cut) -> None:
    store, w = MemoryStore(), np.zeros((6, 4), dtype=np.float32)

    def attempt(*boxes: Box) -> None:
        pieces = [cut("w", w, b, state="exp_avg") for b in boxes]
        parts = [write_part(store, "c", i, [p]) for i, p in enumerate(pieces)]
        assemble(store, "c", parts, {})

    with pytest.raises(FragmentMissing, match=r"w \(exp_avg\) \[4:6, 0:4\]"):
        attempt(Box((0, 0), (4, 4)))
    with pytest.raises(FragmentMissing, match=r"twice.*w \(exp_avg\) \[3:4, 0:4\]"):
        attempt(Box((0, 0), (4, 4)), Box((3, 0), (3, 4)))
    assert not store.exists("c/manifest.parquet")
    attempt(Box((0, 0), (4, 4)), Box((4, 0), (2, 4)))


def test_writers_that_disagree_about_a_tensor_are_refused(cut: Cut) -> None:
    store = MemoryStore()
    parts = [
        write_part(store, "c", 0, [cut("w", np.zeros((2, 2), np.float32), Box((0, 0), (1, 2)))]),
        write_part(store, "c", 1, [cut("w", np.zeros((2, 2), np.int32), Box((1, 0), (1, 2)))]),
    ]
    with pytest.raises(TensorMismatch, match=r"w \(param\) has two dtypes"):
        assemble(store, "c", parts, {})
    with pytest.raises(TensorMismatch, match="same box twice"):
        write_part(store, "c", 2, [cut("w", np.zeros(2)), cut("w", np.zeros(2))])


def test_a_part_that_is_not_the_reported_one_is_refused(cut: Cut) -> None:
    store = MemoryStore()
    part = write_part(store, "c", 0, [cut("w", np.zeros(3))])
    other = WrittenPart(writer=0, manifest=part.manifest, digest="0" * 32, bytes=part.bytes)
    with pytest.raises(ChecksumMismatch, match="writer 0"):
        assemble(store, "c", [other], {})
    with pytest.raises(FragmentMissing, match="writer 7"):
        assemble(store, "c", [WrittenPart(writer=7, manifest="w00007.parquet", digest="", bytes=0)], {})
    store.write("c/w00000.safetensors", store.read("c/w00000.safetensors")[:-1])
    with pytest.raises(FragmentMissing, match="gone or shorter"):
        assemble(store, "c", [part], {})


def test_a_full_device_costs_one_attempt_and_nothing_else(run: RunDirectory, save: Save) -> None:
    term = run.begin_term("a")
    first = save(run, term=term, step=1)
    for step in (2, 3):
        full = RunDirectory(FaultyStore(run.store, [Full(after_bytes=5000)]))
        with pytest.raises(StorageError, match="No space left"):
            save(full, term=term, step=step)
    last = save(run, term=term, step=4)
    assert run.commits() == [first, last]
    run.prune([first.slot, last.slot], term=term)
    assert {p.split("/")[1] for p in run.store.list("checkpoints")} == {
        attempt_path(step=s, generation=1).split("/")[1] for s in (1, 4)
    }
    assert run.store.unfinished() == []


def test_a_failing_store_leaves_no_part_behind(cut: Cut) -> None:
    store = MemoryStore()
    with pytest.raises(StorageError):
        write_part(FaultyStore(store, [Fail(operation="stream")]), "c", 0, [cut("w", np.zeros(3))])
    with pytest.raises(StorageError):
        write_part(FaultyStore(store, [Full(after_bytes=4100)]), "c", 0, [cut("w", np.zeros(3))])
    assert store.list() == []


def test_the_account_puts_every_name_in_one_place() -> None:
    def info(dtype: str, *shape: int) -> TensorInfo:
        return TensorInfo(dtype=dtype, shape=shape)

    stored = {
        ("a", "param"): info("float32", 2),
        ("b", "param"): info("float32", 16),
        ("d", "param"): info("int8"),
    }
    wanted = {
        ("a", "param"): info("float32", 2),
        ("b", "param"): info("bfloat16", 12),
        ("c", "param"): info("int8"),
    }
    found = account(stored, wanted)
    assert (found.restored, found.absent, found.extra) == (
        (("a", "param"),),
        (("c", "param"),),
        (("d", "param"),),
    )
    assert str(found) == (
        "1 restored, 1 absent, 1 extra; "
        "b (param) is float32 [16] in the checkpoint and bfloat16 [12] in the model"
    )
