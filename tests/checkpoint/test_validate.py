"""Claims that can't be true are refused by name before anything is read or allocated for them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_train.checkpoint.checksums import crc, digest
from elastic_train.checkpoint.manifest import SCHEMA, Manifest
from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.errors import (
    CheckpointError,
    FragmentMissing,
    Malformed,
    NoCheckpoint,
    OutsideOfCheckpoint,
    TensorMismatch,
)
from elastic_train.recovery.evidence import Stored
from elastic_train.storage.fsspec_store import open_store

pytestmark = pytest.mark.ring1

DATA = bytes(range(256)) * 4
GOOD: dict[str, Any] = {
    "tensor": "w", "state": "param", "dtype": "float32", "shape": [16], "offsets": [0], "sizes": [16],
    "logical": None, "file": "d.bin", "byte_offset": 0, "byte_strides": None, "checksums": [crc(DATA[:64])],
    "hash": None,
}  # fmt: skip
STATE = {
    "format": "elastic_train.checkpoint", "version": 1, "requires": [], "aliases": {},
    "document": {"step": 1},
}  # fmt: skip
Made = Callable[..., str]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """A checkpoint's directory that stands for itself, with these rows, words and state file."""

    def make(
        rows: list[dict[str, Any]] | None = None,
        *,
        words: dict[str, str] | None = None,
        state: dict[str, Any] | bytes | None = None,
        row_group_size: int | None = None,
    ) -> str:
        home = tmp_path / "copied"
        home.mkdir(exist_ok=True)
        text = state if isinstance(state, bytes) else json.dumps(STATE | (state or {})).encode()
        schema = pa.schema([f.with_nullable(True) for f in SCHEMA])
        table = pa.Table.from_pylist([GOOD] if rows is None else rows, schema=schema)
        said = {"version": "1", "requires": "", "page_bytes": str(4 << 20), "state_hash": digest(text)}
        with pq.ParquetWriter(home / "manifest.parquet", schema, compression="zstd") as writer:
            writer.write_table(table, row_group_size=row_group_size)
            writer.add_key_value_metadata(
                {f"elastic_train.{k}": v for k, v in (said | (words or {})).items()}
            )
        (home / "state.json").write_bytes(text)
        (home / "d.bin").write_bytes(DATA)
        return str(home)

    return make


def read(url: str) -> None:
    checkpoint = open_checkpoint(url)
    checkpoint.kinds()
    for name in checkpoint.tensors:
        checkpoint.read(*name)


def test_the_good_one_opens(made: Made) -> None:
    assert np.array_equal(open_checkpoint(made()).read("w", "param"), np.frombuffer(DATA[:64], np.float32))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"checksums": []}, "one checksum for each of its pages"),
        ({"checksums": [1, 2]}, "one checksum for each of its pages"),
        ({"offsets": [-4]}, "a box outside of its tensor"),
        ({"offsets": [4]}, "a box outside of its tensor"),
        ({"sizes": [-16], "shape": [-16]}, "a shape that no tensor has"),
        ({"shape": [2**62], "offsets": [2**62], "sizes": [2**62]}, "a shape that no tensor has"),
        ({"shape": [2**32] * 2, "offsets": [0, 0], "sizes": [2**32] * 2}, "a shape that no tensor has"),
        ({"shape": [0, 2**61], "offsets": [0, 0], "sizes": [0, 2**61]}, "a shape that no tensor has"),
        ({"shape": [1] * 65, "offsets": [0] * 65, "sizes": [1] * 65}, "65 dims"),
        ({"byte_offset": -8}, "begins before its file"),
        ({"byte_offset": 2**63 - 8}, "ends behind any file"),
        ({"byte_strides": [4]}, "has checksums although"),
        ({"byte_strides": [4, 4], "checksums": None}, "strides for other dims"),
        ({"byte_strides": [-4], "checksums": None}, "strides that lead back"),
        ({"byte_strides": [2**62], "checksums": None}, "strides that lead behind any file"),
        ({"tensor": ""}, "'' as its tensor"),
        ({"state": "a\0b"}, "as its state"),
        ({"file": ""}, "'' as its file"),
        ({"tensor": None}, "no tensor"),
        ({"shape": None}, "no shape"),
        ({"shape": [None]}, "a hole in its shape"),
    ],
)
def test_a_row_that_cannot_be_is_refused(made: Made, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(Malformed, match=said):
        read(made([GOOD | changed]))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"sizes": [8], "checksums": None}], "nobody holds"),
        (
            [
                {"shape": [64], "sizes": [48], "checksums": None},
                {"shape": [64], "sizes": [16], "checksums": None},
            ],
            "nobody holds",
        ),
        ([{}, {"checksums": None}], "held twice"),
    ],
)
def test_boxes_that_do_not_tile_are_refused(made: Made, rows: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(FragmentMissing, match=said):
        read(made([GOOD | row for row in rows]))


def test_a_shape_that_no_file_holds_costs_no_memory(made: Made) -> None:
    huge = GOOD | {"shape": [2**45], "sizes": [2**45], "checksums": None}
    with pytest.raises(FragmentMissing, match=r"d.bin ends at byte 1024, too early; it holds w"):
        read(made([huge]))
    repeated = huge | {"byte_strides": [0]}
    with pytest.raises(Malformed, match="repeat 4 bytes again and again"):
        read(made([repeated]))


def test_more_rows_than_bytes_are_refused_before_they_are_decoded(made: Made) -> None:
    url = made()
    path = Path(url) / "manifest.parquet"
    words = pq.read_metadata(path).metadata
    table = pq.read_table(path).take(pa.array(np.zeros(1 << 19, np.int32)))
    with pq.ParquetWriter(path, table.schema, compression="zstd") as writer:
        writer.write_table(table, row_group_size=1 << 16)
        writer.add_key_value_metadata({k: v for k, v in words.items() if k.startswith(b"elastic")})
    with pytest.raises(Malformed, match=r"bytes claims 524288 rows"):
        read(url)


def test_a_page_that_holds_more_than_the_footer_says_is_refused(made: Made) -> None:
    """The footer's claims are mended to hide what the pages hold."""
    url = made([GOOD] * 9)
    path = Path(url) / "manifest.parquet"
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    refused = 0
    for at in range(footer, len(data) - 8):
        if data[at] == 18:  # 9 as the footer has it: of rows and of values
            path.write_bytes(data[:at] + bytes([2]) + data[at + 1 :])
            with pytest.raises(CheckpointError):
                read(url)
            refused += 1
    assert refused > 5


@pytest.mark.parametrize(
    "index",
    [
        "7", "[[1]]", '[{"a":1}]', "[" * 100_000, "{", '[["w","param","float32",[16],-5,1]]',
        '[["w","param","float32",[16],0,2]]', '[["w","param","float32",[16.0],0,1]]', "[]",
        '[["w","param","float32",[1e300],0,1]]', f'[["w","param","float32",[{2**80}],0,1]]',
        '[["w","param","float32",[16],0,true]]', '[["v","param","float32",[16],0,1]]',
        '[["w","param","float32",[4,4],0,1]]',
    ],
)  # fmt: skip
def test_an_index_that_lies_is_refused(made: Made, index: str) -> None:
    with pytest.raises((Malformed, TensorMismatch)):
        read(made(words={"index": index}))


@pytest.mark.parametrize(
    "state",
    [
        {"aliases": [1]}, {"aliases": None}, {"aliases": {"a": 5}}, {"aliases": {"a": "b", "b": "w"}},
        {"aliases": {"a": "nothing"}}, {"aliases": {"w": "w"}}, {"document": []}, {"document": None},
        {"requires": None}, {"requires": [5]}, {"version": True}, {"version": "1"}, {"views": [1]},
        {"views": {"v": {"of": "w"}}}, {"document": {"step": "1"}}, {"document": {"step": -1}},
        {"views": {"v": {"of": "w", "dim": -1, "spans": [[0, 4]], "single": False}}},
        {"views": {"v": {"of": "w", "dim": 0, "spans": [[0, 4], [2, 6]], "single": False}}},
        {"document": {"a": {"$map": 5}}}, {"document": {"a": {"$map": [[[], 1]]}}},
        {"document": {"a": {"$tuple": "ab"}}}, {"document": {"a": {"$float": "1"}}},
        {"document": {"a": {"$bytes": 5}}}, {"document": {"optimizer": 5}},
        {"document": {"optimizer": {"groups": [5]}}}, {"document": {"optimizer": {"states": ["ab"]}}},
        {"document": {"optimizer": {"reshard": {"w": {"m": [5]}}}}}, {"document": {"foreign": []}},
        {"document": {"trainable": "w"}}, {"document": {"x": float("nan")}},
        b"[]", b"", b"\xff", b'{"a":1,"a":2}', b"[" * 200_000,
    ],
)  # fmt: skip
def test_a_state_file_of_wrong_types_is_refused(made: Made, state: dict[str, Any] | bytes) -> None:
    with pytest.raises(CheckpointError):
        read(made(state=state))


def test_a_document_is_not_deeper_than_what_walks_it(made: Made) -> None:
    nested: Any = 1
    for _ in range(100):
        nested = [nested]
    with pytest.raises(Malformed, match="containers inside each other"):
        read(made(state={"document": {"a": nested}}))


# -- where files may lie --


@pytest.mark.parametrize(
    "file",
    [
        "/etc/passwd", "file:///etc/passwd", "../outside", "../../../etc/passwd", "..", "/dev/zero",
        "http://127.0.0.1:9/x/y", "ftp://127.0.0.1:9/x/y", "zip://x/y", "data://x/y", "memory://x/y",
        "simplecache::file:///etc/passwd", "nonsense://x/y",
    ],
)  # fmt: skip
def test_files_outside_are_never_opened(made: Made, tmp_path: Path, file: str) -> None:
    (tmp_path / "outside").write_bytes(DATA)
    with pytest.raises(OutsideOfCheckpoint, match=r"lies outside of it.*--allow-root"):
        read(made([GOOD | {"file": file}]))


def test_a_root_that_the_caller_names_is_read_and_nothing_beside_it(made: Made, tmp_path: Path) -> None:
    for name in ("named", "beside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "d.bin").write_bytes(DATA)
    roots = [str(tmp_path / "named")]
    row = GOOD | {"file": f"{tmp_path}/named/d.bin"}
    assert open_checkpoint(made([row]), allow_roots=roots).read("w", "param").nbytes == 64
    (tmp_path / "named" / "link.bin").symlink_to(tmp_path / "beside" / "d.bin")
    for file in ("beside/d.bin", "named/../beside/d.bin", "named/link.bin"):
        url = made([GOOD | {"file": f"{tmp_path}/{file}"}])
        with pytest.raises(OutsideOfCheckpoint):
            open_checkpoint(url, allow_roots=roots).read("w", "param")


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_what_is_no_regular_file_in_it_is_refused(made: Made, tmp_path: Path, kind: str) -> None:
    (tmp_path / "outside").write_bytes(DATA)
    url = made()
    path = Path(url) / "d.bin"
    path.unlink()
    match kind:
        case "link":
            path.symlink_to(tmp_path / "outside")
        case "pipe":
            os.mkfifo(path)
        case _:
            path.mkdir()
    with pytest.raises(OutsideOfCheckpoint):
        read(url)


def test_a_snapshot_of_the_hugging_face_cache_is_links_to_its_blobs(made: Made, tmp_path: Path) -> None:
    made()
    home = tmp_path / "models--org--name"
    (home / "blobs").mkdir(parents=True)
    (home / "snapshots").mkdir()
    (tmp_path / "copied").rename(home / "snapshots" / "0123")
    path = home / "snapshots" / "0123" / "d.bin"
    path.rename(home / "blobs" / "abc")
    path.symlink_to("../../blobs/abc")
    read(str(path.parent))


# -- the commit log --


def changed(run: RunDirectory, stored: Stored, root: Path, **fields: Any) -> None:
    path = root / "commits" / f"{stored.slot:08d}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "bogus"}, {"term": "9"}, {"term": None}, {"term": True}, {"path": 5}, {"path": "../../x"},
        {"removes": "abc"}, {"removes": [[1]]}, {"step": "x"}, {"step": 10**400}, {"step": -1},
        {"lineage": [1]}, {"lineage": [["a", 1]]}, {"metrics": [["a", "b"]]}, {"manifest_hash": None},
        {"more": 1},
    ],
)  # fmt: skip
def test_a_record_of_wrong_types_is_refused(
    tmp_path: Path, save: Callable[..., Stored], fields: dict[str, Any]
) -> None:
    run = RunDirectory(open_store(str(tmp_path)))
    stored = save(run, term=run.begin_term("a"), step=1)
    changed(run, stored, tmp_path, **fields)
    with pytest.raises(NoCheckpoint, match=f"slot {stored.slot} of the commit log"):
        Checkpoint.newest(RunDirectory(open_store(str(tmp_path))))


@pytest.mark.parametrize("content", [b"", b"5", b"[]", b"null", b"\xff\xfe", b"[" * 200_000])
def test_a_slot_that_is_no_record_is_refused(
    tmp_path: Path, save: Callable[..., Stored], content: bytes
) -> None:
    run = RunDirectory(open_store(str(tmp_path)))
    stored = save(run, term=run.begin_term("a"), step=1)
    (tmp_path / "commits" / f"{stored.slot + 1:08d}.json").write_bytes(content)
    with pytest.raises(NoCheckpoint, match="can't be read"):
        open_checkpoint(str(tmp_path))


def test_a_far_slot_costs_nothing(tmp_path: Path, save: Callable[..., Stored]) -> None:
    run = RunDirectory(open_store(str(tmp_path)))
    stored = save(run, term=run.begin_term("a"), step=1)
    (tmp_path / "commits" / "99999999.json").write_bytes(b"x")
    with pytest.raises(NoCheckpoint, match=f"slot {stored.slot + 1} is missing"):
        open_checkpoint(str(tmp_path))


def test_a_manifest_without_rows_is_one() -> None:
    assert len(Manifest.decode(Manifest.of([]).encode(), url="x")) == 0


def test_json_of_more_lists_than_memory_allows_is_not_built(made: Made) -> None:
    lists = b"[" + b"[]," * 2_000_000 + b"[]]"
    state = b'{"format":"elastic_train.checkpoint","version":1,"document":{"a":' + lists + b"}}"
    with pytest.raises(Malformed, match=r"lists and mappings in \d+ bytes"):
        read(made(state=state))
    with pytest.raises(Malformed, match="lists and mappings"):
        read(made(words={"index": lists.decode()}))


@pytest.mark.parametrize("said", [b"5", b"[]", b"{}", b'{"config":5,"fingerprint":{}}', b"", b"\xff"])
def test_what_a_run_is_has_its_types(tmp_path: Path, said: bytes) -> None:
    (tmp_path / "run.json").write_bytes(said)
    with pytest.raises(CheckpointError):
        RunDirectory(open_store(str(tmp_path))).config()
    with pytest.raises(CheckpointError):
        RunDirectory(open_store(str(tmp_path))).create({}, {})
