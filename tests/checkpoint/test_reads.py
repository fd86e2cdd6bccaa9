"""Only the pages that hold what is wanted are read, in few requests; foreign bytes are read in place."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.checkpoint import ranges
from elastic_train.checkpoint.checksums import LARGEST, digest
from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.document import StateFile
from elastic_train.checkpoint.fetch import Files
from elastic_train.checkpoint.manifest import SCHEMA, Manifest, Row
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.writer import write_part
from elastic_train.errors import OutsideOfCheckpoint
from elastic_train.geometry.box import Box
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.memory_store import MemoryStore
from elastic_train.testing.faulty_store import FaultyStore

pytestmark = pytest.mark.ring1

Cut = Callable[..., Piece]


@given(st.data(), st.lists(st.integers(1, 6), min_size=0, max_size=4), st.sampled_from([1, 2, 8]))
@settings(max_examples=150, deadline=None)
def test_touched_pages_are_those_that_hold_an_element(
    data: st.DataObject, sizes: list[int], item: int
) -> None:
    spans = [sorted(data.draw(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)))) for n in sizes]
    box = Box(tuple(a for a, _ in spans), tuple(b - a + 1 for a, b in spans))
    numbers = np.arange(int(np.prod(sizes)) * item).reshape(*sizes, item)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "page_bytes", lambda size: 16)
        expected = np.zeros(-(-numbers.size // 16), dtype=bool)
        expected[np.unique(numbers[box.slices] // 16)] = True
        assert np.array_equal(ranges.touched(tuple(sizes), box, item), expected)


@pytest.fixture
def big(cut: Cut) -> tuple[Checkpoint, np.ndarray, FaultyStore]:
    """`w` of 48 pages in one fragment, 4 a row, and 40 small tensors behind it."""
    array = np.arange(12 * LARGEST // 4, dtype=np.int32).reshape(12, -1)
    store = FaultyStore(MemoryStore(), ())
    small = [cut(f"b{i:02d}", np.full(50, i, dtype=np.int16)) for i in range(40)]
    assemble(store, "c", [write_part(store, "c", 0, [cut("w", array), *small])], {})
    checkpoint = Checkpoint.open(store, "c")
    store.calls.clear()
    return checkpoint, array, store


def test_a_small_slice_of_a_large_fragment_reads_one_page(
    big: tuple[Checkpoint, np.ndarray, FaultyStore],
) -> None:
    checkpoint, array, store = big
    box = Box((5, 1000), (1, 10))
    assert np.array_equal(checkpoint.read("w", "param", box), array[box.slices])
    assert checkpoint.files.bytes_read == LARGEST // 4
    assert store.calls == {"read": 1}


def test_small_neighbours_are_one_request(big: tuple[Checkpoint, np.ndarray, FaultyStore]) -> None:
    checkpoint, _, store = big
    got = checkpoint.read_many([(f"b{i:02d}", "param", Box((10,), (5,))) for i in range(40)])
    assert [g.tolist() for g in got] == [[i] * 5 for i in range(40)]
    assert store.calls == {"read": 1}
    assert checkpoint.files.bytes_read == 40 * 100


def test_pages_wanted_twice_are_read_once(big: tuple[Checkpoint, np.ndarray, FaultyStore]) -> None:
    checkpoint, array, _ = big
    boxes = [Box((0, 0), (4, 100)), Box((2, 50), (3, 100)), Box((0, 0), (4, 100))]
    got = checkpoint.read_many([("w", "param", b) for b in boxes])
    for box, back in zip(boxes, got, strict=True):
        assert np.array_equal(back, array[box.slices])
    assert checkpoint.files.bytes_read == 5 * LARGEST // 4


def test_a_whole_tensor_is_read_once_in_large_requests(
    big: tuple[Checkpoint, np.ndarray, FaultyStore],
) -> None:
    checkpoint, array, store = big
    assert np.array_equal(checkpoint.read("w", "param"), array)
    assert checkpoint.files.bytes_read == array.nbytes
    assert store.calls == {"read": 6}


def test_two_halves_cost_no_more_than_the_whole(big: tuple[Checkpoint, np.ndarray, FaultyStore]) -> None:
    checkpoint, array, _ = big
    for first in (0, 6):
        checkpoint.read("w", "param", Box((first, 0), (6, array.shape[1])))
    assert checkpoint.files.bytes_read == array.nbytes


def test_foreign_bytes_are_read_in_place_by_their_strides(tmp_path: Path) -> None:
    """Another system's file: `q` is stored transposed, `k` interleaved with it, both behind a header."""
    q, k = np.arange(12, dtype=np.float32).reshape(3, 4), np.arange(100, 112, dtype=np.float32).reshape(3, 4)
    mixed = np.stack([q.T, k.T], axis=-1)  # [4, 3, 2]
    (tmp_path / "other system.bin").write_bytes(b"header__" + mixed.tobytes())
    rows = [
        Row(
            tensor=name,
            state="param",
            dtype="float32",
            shape=(3, 4),
            box=Box((0, 0), (3, 4)),
            file=f"{tmp_path}/other system.bin",
            byte_offset=8 + 4 * i,
            byte_strides=(8, 24),
        )
        for i, name in enumerate(("q", "k"))
    ]
    store, state = MemoryStore(), StateFile(document={}).encode()
    store.write("c/state.json", state)
    store.write("c/manifest.parquet", Manifest.of(rows, extra={"state_hash": digest(state)}).encode())
    checkpoint = Checkpoint.open(store, "c")
    with pytest.raises(OutsideOfCheckpoint, match=r"other system.bin.*--allow-root"):
        checkpoint.read("q", "param")
    checkpoint.files.places.allow([str(tmp_path)])
    assert np.array_equal(checkpoint.read("q", "param"), q)
    assert np.array_equal(checkpoint["k"]["param"][1:, 2], k[1:, 2])


def test_a_manifest_may_refer_to_an_older_checkpoint_of_the_run(cut: Cut) -> None:
    store = MemoryStore()
    write_part(store, "checkpoints/step-0000000001.g1", 0, [cut("w", np.arange(5))])
    old = Manifest.decode(store.read("checkpoints/step-0000000001.g1/w00000.parquet"), url="x").row(0)
    state = StateFile(document={}).encode()
    row = Row(
        tensor="w", state="param", dtype="int64", shape=(5,), box=Box((0,), (5,)),
        file=f"../step-0000000001.g1/{old.file}", byte_offset=old.byte_offset, checksums=old.checksums,
        hash=old.hash,
    )  # fmt: skip
    store.write("checkpoints/step-0000000002.g1/state.json", state)
    manifest = Manifest.of([row], extra={"state_hash": digest(state)})
    store.write("checkpoints/step-0000000002.g1/manifest.parquet", manifest.encode())
    of_the_run = Checkpoint.open(store, "checkpoints/step-0000000002.g1", siblings="checkpoints")
    assert of_the_run.read("w", "param").tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(OutsideOfCheckpoint):
        Checkpoint.open(store, "checkpoints/step-0000000002.g1").read("w", "param")


def test_twenty_thousand_fragments_are_planned_as_columns() -> None:
    n = 20_000
    rows = [
        Row(
            tensor=f"t{i // 100}", state="param", dtype="float32", shape=(100, 64),
            box=Box((i % 100, 0), (1, 64)), file="w00000.safetensors", byte_offset=i * 256,
            checksums=(0,), hash=bytes(16),
        )
        for i in range(n)
    ]  # fmt: skip
    manifest = Manifest.decode(Manifest.of(rows).encode(), url="x")
    index = ranges.RangeIndex(manifest, url="x")
    reads = index.reads([("t150", "param", Box((10, 0), (20, 64)))])
    assert [(r.start, r.length, len(r.segments)) for r in reads] == [(15_010 * 256, 20 * 256, 20)]


def million() -> pa.Table:
    """1,000 tensors in 1,000 rows each."""
    n = 1_000_000
    names = pa.array([f"layers.{i}.weight" for i in range(1000)])
    place = np.arange(n)

    def pairs(values: np.ndarray) -> pa.Array:
        return pa.ListArray.from_arrays(
            pa.array(np.arange(n + 1) * 2, pa.int32()), pa.array(values.reshape(-1))
        )

    rows = np.stack([place % 1000, np.zeros(n, np.int64)], axis=1)
    return pa.table(
        {
            "tensor": names.take(pa.array(place // 1000)),
            "state": pa.repeat("param", n),
            "dtype": pa.repeat("float32", n),
            "shape": pairs(np.tile([1000, 64], n)),
            "offsets": pairs(rows),
            "sizes": pairs(np.tile([1, 64], n)),
            "logical": pa.nulls(n, pa.string()),
            "file": pa.repeat("w00000.safetensors", n),
            "byte_offset": place * 256,
            "byte_strides": pa.nulls(n, pa.list_(pa.int64())),
            "checksums": pa.ListArray.from_arrays(
                pa.array(np.arange(n + 1), pa.int32()), pa.array(place.astype(np.uint32))
            ),
            "hash": pa.repeat(pa.scalar(bytes(16), pa.binary(16)), n),
        },
        schema=SCHEMA,
    )


def test_a_million_fragments_are_opened_and_planned_in_a_tenth_of_a_second() -> None:
    data = Manifest.from_table(million(), url="x").encode()
    seconds = []
    for _ in range(3):
        began = time.process_time()  # of this process: others use the machine too
        index = ranges.RangeIndex(Manifest.decode(data, url="x"), url="x")
        reads = index.reads([("layers.150.weight", "param", Box((10, 0), (20, 64)))])
        seconds.append(time.process_time() - began)
        assert [(r.start, r.length, len(r.segments)) for r in reads] == [(150_010 * 256, 20 * 256, 20)]
    assert min(seconds) < 0.1


def test_a_large_manifest_read_in_parts_is_the_one_that_was_written() -> None:
    table = million().slice(0, 40_000)
    whole = Manifest.from_table(table, url="x")
    lazy = Manifest.decode(whole.encode(), url="x")
    rng = np.random.default_rng(0)
    places = rng.integers(0, len(whole), 50).tolist()
    assert lazy.rows(places) == whole.rows(places)
    assert lazy.kinds == whole.kinds
    for key in (0, 16, 39):
        for a, b in zip(lazy.boxes(key), whole.boxes(key), strict=True):
            assert np.array_equal(a, b)
    assert lazy.table.equals(whole.table)
    assert np.array_equal(lazy.fragments.offsets, whole.fragments.offsets)


def test_a_manifest_that_leads_out_of_the_run_is_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    files = Files(store, "checkpoints/step-0000000001.g1", siblings="checkpoints")
    assert (
        files.at("../step-0000000000.g1/w.safetensors")[1] == "checkpoints/step-0000000000.g1/w.safetensors"
    )
    for file in ("../../../secret", "../../secret", "../secret", "..", "../step-0000000000.g1/a/b"):
        with pytest.raises(OutsideOfCheckpoint, match="lies outside of it"):
            files.at(file)


def test_the_files_of_a_large_manifest_are_found_without_its_other_columns() -> None:
    table = million().slice(0, 40_000)
    lazy = Manifest.decode(Manifest.from_table(table, url="x").encode(), url="x")
    assert lazy.distinct("file") == ["w00000.safetensors"]
    assert lazy.distinct("tensor") == sorted(f"layers.{i}.weight" for i in range(40))
    assert lazy.counts() == {(f"layers.{i}.weight", "param"): 1000 for i in range(40)}
