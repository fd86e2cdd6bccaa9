"""What is written in any cut is read in any other, bit for bit, for every dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.writer import write_part
from elastic_train.errors import FormatUnsupported, TensorMismatch
from elastic_train.geometry.box import Box
from elastic_train.geometry.fragments import ITEM_BYTES
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.memory_store import MemoryStore
from elastic_train.storage.store import Store

pytestmark = pytest.mark.ring1

Cut = Callable[..., Piece]


def write(store: Store, *writers: list[Piece], aliases: dict[str, str] | None = None) -> Checkpoint:
    parts = [write_part(store, "c", i, pieces) for i, pieces in enumerate(writers)]
    assembled = assemble(store, "c", parts, {"step": 3}, aliases=aliases)
    return Checkpoint.open(store, "c", manifest_hash=assembled.manifest_hash)


def random_bits(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    kind = ELEMENTS[dtype].numpy
    rng = np.random.default_rng(7)
    high = 2 if dtype == "bool" else 256
    data = rng.integers(0, high, size=int(np.prod(shape)) * kind.itemsize, dtype=np.uint8)
    return data.view(kind).reshape(shape)


def bits(array: np.ndarray) -> bytes:
    return array.tobytes()


def test_the_dtypes_are_those_of_the_geometry() -> None:
    assert {name: kind.bytes for name, kind in ELEMENTS.items()} == dict(ITEM_BYTES)


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_every_dtype_in_every_form_comes_back_bit_for_bit(dtype: str, cut: Cut) -> None:
    arrays = {
        "zero-dim": random_bits(dtype, ()),
        "empty": random_bits(dtype, (3, 0, 2)),
        "vector": random_bits(dtype, (5,)),
        "transposed": random_bits(dtype, (3, 4)).T,
        "every other": random_bits(dtype, (6, 4))[::2, 1::2],
    }
    checkpoint = write(MemoryStore(), [cut(name, a) for name, a in arrays.items()])
    for name, array in arrays.items():
        back = checkpoint.read(name, "param")
        assert (back.dtype, back.shape, bits(back)) == (array.dtype, array.shape, bits(array))


def test_a_dtype_without_a_code_is_refused_by_name() -> None:
    with pytest.raises(FormatUnsupported, match="complex128"):
        Piece(tensor="w", state="param", dtype="complex128", shape=(1,), box=Box((0,), (1,)), data=bytes(16))


def test_bytes_or_boxes_of_the_wrong_size_are_refused() -> None:
    with pytest.raises(TensorMismatch, match=r"w:param.*5 bytes"):
        Piece(tensor="w", state="param", dtype="int16", shape=(3,), box=Box((0,), (3,)), data=bytes(5))
    with pytest.raises(TensorMismatch, match="inside"):
        Piece(tensor="w", state="param", dtype="int8", shape=(3,), box=Box((1,), (3,)), data=bytes(3))


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes that tile it: cut at random, again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=3)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[dim]))
        for start, stop in ((0, at), (at, box.sizes[dim])):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim], sizes[dim] = offsets[dim] + start, stop - start
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    return shape, [b for b in boxes if b.numel]


@given(st.data(), tilings(), tilings())
@settings(max_examples=60, deadline=None)
def test_any_cut_is_read_in_any_other(data: st.DataObject, first: object, second: object) -> None:
    store = MemoryStore()
    writers: list[list[Piece]] = [[], [], []]
    arrays: dict[str, np.ndarray] = {}
    for name, (shape, boxes) in (("first", first), ("second", second)):
        array = arrays[name] = random_bits("int32", shape)
        for box in boxes:
            piece = Piece(
                tensor=name, state="param", dtype="int32", shape=shape, box=box, data=array[box.slices]
            )
            writers[data.draw(st.integers(0, 2))].append(piece)
    checkpoint = write(store, *writers)
    requests = []
    for name, array in arrays.items():
        spans = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in array.shape]
        box = Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
        requests += [(name, "param", box), (name, "param", Box.whole(array.shape))]
    for (name, _, box), back in zip(requests, checkpoint.read_many(requests), strict=True):
        assert np.array_equal(back, arrays[name][box.slices])


def test_fragments_of_many_pages_are_read_across_their_pages(tmp_path: Path, cut: Cut) -> None:
    array = np.arange((3 << 20) + 1000, dtype=np.int32).reshape(-1, 8)
    store = open_store(str(tmp_path))
    half = len(array) // 3
    checkpoint = write(
        store,
        [cut("w", array, Box((0, 0), (half, 8))), cut("small", np.arange(3))],
        [cut("w", array, Box((half, 0), (len(array) - half, 8)))],
    )
    assert np.array_equal(checkpoint.read("w", "param"), array)
    column = Box((100, 3), (len(array) - 200, 2))
    assert np.array_equal(checkpoint.read("w", "param", column), array[column.slices])


def test_the_files_are_safetensors_files_with_aligned_large_pieces(tmp_path: Path, cut: Cut) -> None:
    arrays = {"large": random_bits("bfloat16", (700_000,)), "odd": random_bits("uint8", (1_100_003,))}
    arrays |= {"small": random_bits("float64", (3,)), "bool": random_bits("bool", (3,))}
    checkpoint = write(open_store(str(tmp_path)), [cut(name, a) for name, a in arrays.items()])
    found = safetensors.numpy.load_file(tmp_path / "c/w00000.safetensors")
    for name, array in arrays.items():
        if name != "large":  # safetensors' numpy side has no bfloat16
            assert bits(found[f"{name}:param"]) == bits(array)
    for i in range(len(arrays)):
        row = checkpoint.manifest.row(i)
        assert row.byte_offset % (4096 if row.tensor in ("large", "odd") else ELEMENTS[row.dtype].bytes) == 0


def test_a_slice_of_a_large_buffer_costs_its_own_bytes(tmp_path: Path) -> None:
    buffer = np.zeros(1 << 20, dtype=np.float32)
    store = open_store(str(tmp_path))
    parts = []
    for rank in range(8):
        box = Box((rank * (1 << 17),), (1 << 17,))
        piece = Piece(
            tensor="w", state="param", dtype="float32", shape=buffer.shape, box=box, data=buffer[box.slices]
        )
        parts.append(write_part(store, "c", rank, [piece]))
    assembled = assemble(store, "c", parts, {})
    on_disk = sum(store.size(p) for p in store.list("c"))
    assert buffer.nbytes < on_disk < 1.05 * buffer.nbytes
    # `bytes` is what was written, to the byte
    assert assembled.bytes == on_disk


def test_an_alias_leads_to_the_tensor_it_is_tied_to(cut: Cut) -> None:
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    checkpoint = write(
        MemoryStore(), [cut("emb", w), cut("emb", w + 1, state="exp_avg")], aliases={"head": "emb"}
    )
    assert np.array_equal(checkpoint.read("head", "exp_avg"), w + 1)
    assert np.array_equal(checkpoint["head"]["param"][1], w[1])
    assert set(checkpoint) == {"emb", "head"}
    with pytest.raises(TensorMismatch, match="head of nothing"):
        write(MemoryStore(), [cut("emb", w)], aliases={"head": "nothing"})


def test_indexing_reads_like_numpy(cut: Cut) -> None:
    w = np.arange(120, dtype=np.int64).reshape(4, 5, 6)
    lazy = write(MemoryStore(), [cut("w", w), cut("s", np.array(3.5))])["w"]["param"]
    assert (lazy.shape, lazy.dtype) == ((4, 5, 6), w.dtype)
    for index in (
        np.s_[1:3], np.s_[-1], np.s_[:, 2], np.s_[..., 1:4], np.s_[1, ..., 2], np.s_[3:1], np.s_[:, -4:-1, 5],
        np.s_[...], np.s_[1, 2, 3],
    ):  # fmt: skip
        assert np.array_equal(lazy[index], w[index])
    assert np.array_equal(np.asarray(lazy), w)
    with pytest.raises(IndexError):
        lazy[4]
    with pytest.raises(IndexError):
        lazy[::2]
    with pytest.raises(IndexError):
        lazy[0, 0, 0, 0]


def test_elements_can_be_put_where_they_belong(cut: Cut) -> None:
    w = random_bits("bfloat16", (6, 4))
    checkpoint = write(MemoryStore(), [cut("w", w, Box((0, 0), (3, 4))), cut("w", w, Box((3, 0), (3, 4)))])
    memory = np.zeros((4, 6), dtype=np.int16)
    checkpoint.read_many([("w", "param", Box((1, 0), (4, 3)))], into=[memory.T[1:5, :3]])
    assert np.array_equal(memory.T[1:5, :3], w.view(np.int16)[1:5, :3])
    assert memory.any(axis=0).tolist() == [False, True, True, True, True, False]


def test_what_is_not_stored_is_named(cut: Cut) -> None:
    checkpoint = write(MemoryStore(), [cut("w", np.zeros((2, 2), np.float32))])
    with pytest.raises(TensorMismatch, match=r"no w \(exp_avg\)"):
        checkpoint.read("w", "exp_avg")
    with pytest.raises(TensorMismatch, match="has no box"):
        checkpoint.read("w", "param", Box((1, 0), (2, 2)))
