"""Lines of JSON, Megatron's indexed data sets and Arrow directories, by number."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.data import jsonl
from elastic_train.data.arrow import ArrowRows
from elastic_train.data.jsonl import JsonLines
from elastic_train.data.megatron_indexed import MAGIC, MegatronTokens
from elastic_train.data.packing import Packed
from elastic_train.errors import ConfigError

pytestmark = pytest.mark.ring1


@given(
    files=st.lists(st.lists(st.none() | st.integers() | st.text() | st.booleans(), max_size=6), min_size=1),
    line_break=st.sampled_from(["\n", "\r\n", "\n\n", "\n \n", "\r\n \t \r\n"]),
    ends_with_one=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_lines_are_values_by_number_across_files(
    files: list[list[Any]], line_break: str, ends_with_one: bool
):
    memory = fsspec.filesystem("memory")
    memory.rm("/lines", recursive=True) if memory.exists("/lines") else None
    for number, values in enumerate(files):
        text = line_break.join(json.dumps(v, ensure_ascii=False) for v in values)
        memory.pipe(f"/lines/{number:03}.jsonl", (text + line_break * ends_with_one).encode())
    rows = JsonLines([f"memory://lines/{number:03}.jsonl" for number in range(len(files))])
    expected = [value for values in files for value in values]
    assert [rows[i] for i in range(len(rows))] == expected
    assert [pickle.loads(pickle.dumps(rows))[i] for i in reversed(range(len(expected)))] == expected[::-1]


def test_fields_are_chosen_and_what_is_wrong_is_named_with_its_place(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "one", "id": 1}\n{"text": "two"}\n{"text": \n')
    (tmp_path / "other.txt").write_text("no JSON")
    rows = JsonLines(tmp_path, fields=["text"])
    assert (len(rows), rows[0], rows[1]) == (3, {"text": "one"}, {"text": "two"})
    with pytest.raises(ConfigError, match=r"byte 41 of file://.*a\.jsonl is no JSON"):
        rows[2]
    with pytest.raises(ConfigError, match=r"byte 25 of .* has no 'id'"):
        JsonLines(tmp_path, fields=["id"])[1]
    with pytest.raises(IndexError):
        rows[3]


def test_lines_of_many_blocks_and_a_byte_order_mark_are_numbered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "BLOCK", 7)
    values = [1, "x" * 100, [], 22, {"a": None}, ""]
    text = "\ufeff" + "\r\n  \n".join(map(json.dumps, values))
    (tmp_path / "a.jsonl").write_text(text, newline="")
    rows = JsonLines(tmp_path)
    assert [rows[i] for i in range(len(rows))] == values


@pytest.mark.parametrize("name", ["b.jsonl.gz", "b.jsonl.zst"])
def test_compressed_lines_are_not_left_out_without_a_word(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.jsonl").write_text("1\n")
    (tmp_path / name).write_bytes(b"")
    for places in (tmp_path, tmp_path / name, f"{tmp_path}/*.jsonl*", tmp_path.as_uri()):
        with pytest.raises(ConfigError, match=rf"{name} is compressed"):
            len(JsonLines(places))


def write_megatron(prefix: Path, documents: list[list[int]], code: int = 8, kind: str = "<u2") -> None:
    """As megatron/core/datasets/indexed_dataset.py does it."""
    arrays = [np.array(document, dtype=kind) for document in documents]
    prefix.with_suffix(".bin").write_bytes(b"".join(array.tobytes() for array in arrays))
    lengths = np.array([len(a) for a in arrays], dtype="<i4")
    offsets = np.concatenate(([0], np.cumsum([a.nbytes for a in arrays])[:-1])).astype("<i8")
    ends = np.arange(len(arrays) + 1, dtype="<i8")
    head = MAGIC + struct.pack("<QBQQ", 1, code, len(arrays), len(ends))
    prefix.with_suffix(".idx").write_bytes(head + lengths.tobytes() + offsets.tobytes() + ends.tobytes())


@pytest.mark.parametrize(("code", "kind"), [(8, "<u2"), (4, "<i4"), (5, "<i8"), (1, "u1")])
def test_documents_of_megatron_are_tokens_by_number_and_can_be_packed(tmp_path: Path, code: int, kind: str):
    documents = [[1, 2, 3], [4], [], [5, 6, 7, 8, 250]]
    write_megatron(tmp_path / "text_document", documents, code, kind)
    for name in ("text_document", "text_document.idx", "text_document.bin"):
        tokens = MegatronTokens(tmp_path / name)
        assert [tokens[i].tolist() for i in range(len(tokens))] == documents
        assert tokens[0].dtype == np.int64
    assert pickle.loads(pickle.dumps(tokens))[3].tolist() == documents[3]
    packed = Packed(MegatronTokens(tmp_path / "text_document"), seq_len=4)
    held = np.concatenate([packed[i]["tokens"][packed[i]["documents"] > 0] for i in range(len(packed))])
    assert sorted(held.tolist()) == sorted(t for d in documents for t in d)


def test_an_index_is_believed_after_it_was_checked(tmp_path: Path):
    prefix = tmp_path / "d"
    write_megatron(prefix, [[1, 2], [3]])
    good = prefix.with_suffix(".idx").read_bytes()
    for data, text in [
        (b"x" + good[1:], "does not begin as one"),
        (good[:9] + struct.pack("<Q", 2) + good[17:], "its version is 2"),
        (good[:17] + b"\x07" + good[18:], "dtype 7"),
        (good[:18] + struct.pack("<Q", 1 << 60) + good[26:], "too short for 1152921504606846976"),
        (good[:34] + struct.pack("<i", 900) + good[38:], "outside of the 6 bytes"),
        (good[:34] + struct.pack("<i", -1) + good[38:], "outside of the 6 bytes"),
    ]:
        prefix.with_suffix(".idx").write_bytes(data)
        with pytest.raises(ConfigError, match=text):
            len(MegatronTokens(prefix))


def write_arrow(directory: Path, tables: list[dict[str, Any]], *, extra: bool = True) -> None:
    """As save_to_disk of Hugging Face's datasets does it, with the cache of a map beside it."""
    directory.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(tables):05}.arrow" for i in range(len(tables))]
    for name, columns in zip(names, tables, strict=True):
        table = pa.table(columns)
        with pa.OSFile(str(directory / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    if extra:
        (directory / "cache-1f.arrow").write_bytes((directory / names[0]).read_bytes())


def test_a_saved_data_set_gives_its_rows_and_not_its_caches(tmp_path: Path):
    write_arrow(
        tmp_path / "saved/train",
        [{"id": [0, 1, 2], "tokens": [[1], [2, 3], []]}, {"id": [3], "tokens": [[4, 5, 6]]}],
    )
    rows = ArrowRows(tmp_path / "saved/train")
    assert [rows[i]["id"] for i in range(len(rows))] == [0, 1, 2, 3]
    assert rows[1]["tokens"].tolist() == [2, 3]
    assert rows[1]["tokens"].dtype == np.int64
    assert list(pickle.loads(pickle.dumps(ArrowRows(tmp_path / "saved/train", columns=["id"])))[3]) == ["id"]
    with pytest.raises(ConfigError, match=r"no column 'text'.*The columns are id, tokens"):
        len(ArrowRows(tmp_path / "saved/train", columns=["text"]))
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(ConfigError, match=r"several data sets.*saved/train"):
        ArrowRows(tmp_path / "saved")


def test_plain_arrow_files_of_both_formats_are_read(tmp_path: Path):
    table = pa.table({"x": [1.5, 2.5]})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    write_arrow(tmp_path / "b", [{"x": [3.5]}], extra=False)
    rows = ArrowRows([tmp_path / "a.arrow", tmp_path / "b/data-00000-of-00001.arrow"])
    assert [rows[i]["x"] for i in range(len(rows))] == [1.5, 2.5, 3.5]
    (tmp_path / "c.arrow").write_bytes(b"neither of them")
    with pytest.raises(ConfigError, match=r"c\.arrow is no Arrow file"):
        len(ArrowRows(tmp_path / "c.arrow"))
