"""The golden run of version 1 is read by every later release, and by a reader written by the book."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import crc32c
import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash

from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.checkpoint.verify import verify
from elastic_train.errors import FormatUnsupported
from elastic_train.geometry.state_layout import Blockwise, Coupled, Projection, Scalar
from elastic_train.recovery.evidence import Stored
from elastic_train.storage.fsspec_store import open_store

pytestmark = pytest.mark.ring1

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"
NUMPY = {"bfloat16": ml_dtypes.bfloat16}


def expected(add: int) -> dict[tuple[str, str], np.ndarray]:
    w = np.arange(24, dtype=np.float32).reshape(6, 4) + add
    return {
        ("emb.weight", "param"): (np.arange(10).reshape(5, 2) / 4 + add).astype(ml_dtypes.bfloat16),
        ("layers.0.w", "exp_avg"): w * 2,
        ("layers.0.w", "param"): w,
        ("mask", "buffer"): np.array([True, False, True]),
        ("nothing", "buffer"): np.zeros((0, 3), np.int8),
        ("scale", "param"): np.array(1.5 + add),
        ("seen", "buffer"): np.array([2**40 + (25 if add == 2 else 20)]),
    }


DOCUMENT = {
    "step": 25,
    "big": 2**70,
    "betas": (0.9, 0.95),
    "note": "ü ☃",
    "none": None,
    "nested": {"l": [1, 2.5, True], "$odd": {1: "one"}},
    "key": b"\x00\xff",
    "best": math.inf,
}


def test_the_golden_run_is_read_by_this_release() -> None:
    run = RunDirectory(open_store(str(GOLDEN)))
    older, newer = run.commits()
    assert older == Stored(slot=3, step=20, generation=1, term=1, path="checkpoints/step-0000000020.g1")
    assert newer == Stored(slot=5, step=25, generation=2, term=2, path="checkpoints/step-0000000025.g2")
    assert run.before(newer) == older
    assert run.config() == {"max_steps": 100}
    for stored, add in ((older, 1), (newer, 2)):
        checkpoint = Checkpoint.of(run, stored)
        assert verify(checkpoint).sound
        arrays = expected(add)
        assert set(checkpoint.tensors) == set(arrays)
        for (tensor, state), array in arrays.items():
            back = checkpoint.read(tensor, state)
            assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
    newest = open_checkpoint(str(GOLDEN))
    assert newest.document == DOCUMENT
    assert newest["head.weight"]["param"][4].tolist() == [4.0, 4.25]


def test_a_newer_version_of_it_is_refused(tmp_path: Path) -> None:
    directory = "checkpoints/step-0000000025.g2"
    shutil.copytree(GOLDEN / directory, tmp_path / "alone")
    state = (tmp_path / "alone/state.json").read_bytes().replace(b'"version":1', b'"version":2')
    manifest = pq.ParquetFile(tmp_path / "alone/manifest.parquet")
    words = {k.decode(): v.decode() for k, v in manifest.metadata.metadata.items()}
    words["elastic_train.state_hash"] = xxhash.xxh3_128_hexdigest(state)
    table = manifest.read()
    with pq.ParquetWriter(tmp_path / "alone/manifest.parquet", table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(words)
    (tmp_path / "alone/state.json").write_bytes(state)
    with pytest.raises(FormatUnsupported, match="version 2"):
        open_checkpoint(str(tmp_path / "alone"))


def test_the_specification_is_enough_to_read_it() -> None:
    kept, before, term = {}, "", 0
    for number in range(1, 7):
        data = (GOLDEN / f"commits/{number:08d}.json").read_bytes()
        record = json.loads(data)
        assert (record["format"], record["after_hash"]) == ("elastic_train.commit/1", before)
        before = xxhash.xxh3_128_hexdigest(data)
        if record["kind"] == "fence":
            term = max(term, record["term"])
        elif record["term"] == term:
            kept[number] = record
            for slot in record["removes"]:
                del kept[slot]
    newest = max((r for r in kept.values() if r["kind"] == "commit"), key=lambda r: r["slot"])
    directory = GOLDEN / newest["path"]
    manifest = (directory / "manifest.parquet").read_bytes()
    assert xxhash.xxh3_128_hexdigest(manifest) == newest["manifest_hash"]
    file = pq.ParquetFile(directory / "manifest.parquet")
    state = (directory / "state.json").read_bytes()
    assert file.metadata.metadata[b"elastic_train.state_hash"].decode() == xxhash.xxh3_128_hexdigest(state)
    arrays: dict[tuple[str, str], np.ndarray] = {}
    for row in file.read().to_pylist():
        kind = np.dtype(NUMPY.get(row["dtype"], row["dtype"]))
        size = math.prod(row["sizes"]) * kind.itemsize
        data = (directory / row["file"]).read_bytes()[row["byte_offset"] :][:size]
        step = next(p for p in (2**n for n in range(16, 23)) if p * 64 >= size or p == 4194304)
        pages = [data[i : i + step] for i in range(0, size, step)]
        assert [crc32c.crc32c(p) for p in pages] == row["checksums"]
        assert xxhash.xxh3_128_digest(data) == row["hash"]
        whole = arrays.setdefault((row["tensor"], row["state"]), np.zeros(row["shape"], kind))
        box = tuple(slice(o, o + s) for o, s in zip(row["offsets"], row["sizes"], strict=True))
        whole[box] = np.frombuffer(data, kind).reshape(row["sizes"])
    for name, array in expected(2).items():
        assert arrays[name].tobytes() == array.tobytes()
    assert arrays.keys() == expected(2).keys()


def test_states_in_blocks_and_projections_of_the_golden_run_are_read_as_what_they_are() -> None:
    checkpoint = open_checkpoint(str(GOLDEN.parent / "v1_states"))
    assert verify(checkpoint).sound
    assert checkpoint.kinds() == {
        ("a", "state1"): Blockwise(256, 256),
        ("a", "absmax1"): Blockwise(256, 1),
        ("a", "qmap1"): Scalar(),
        ("b", "row_var"): Projection((0, None)),
        ("b", "col_var"): Projection((None, 1)),
        ("c", "factor"): Coupled(),
    }
    written = json.loads((GOLDEN.parent / "v1_states/checkpoints/step-0000000003.g1/state.json").read_text())
    assert written["requires"] == ["reshard"]
    assert written["document"]["optimizer"]["reshard"]["b"]["col_var"] == ["projection", [None, 1]]
    assert checkpoint["a"]["state1"][15, 30:].tolist() == [(7 + 510) % 251, (7 + 511) % 251]
