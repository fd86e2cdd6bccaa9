"""What is exported and read back is the same to the bit, in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from elastic_train.checkpoint.differences import differences
from elastic_train.checkpoint.exporters.dcp import export_dcp
from elastic_train.checkpoint.exporters.hf import export_hf
from elastic_train.checkpoint.exporters.ucp import export_ucp
from elastic_train.checkpoint.import_run import adopt
from elastic_train.checkpoint.language.mapped import Readable
from elastic_train.checkpoint.language.parse import parse
from elastic_train.checkpoint.language.specification import IDENTITY
from elastic_train.checkpoint.language.translated_view import as_ours, as_theirs
from elastic_train.checkpoint.lazy_arrays import Array
from elastic_train.checkpoint.manifest import Row
from elastic_train.checkpoint.ranges import Request
from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.errors import ConfigError, TensorMismatch
from elastic_train.geometry.box import Box
from elastic_train.storage.fsspec_store import open_store

pytestmark = pytest.mark.ring1

LLAMA = """
ties = { "head.weight" = "embed.weight" }
buffers = "{name:scale|count|mask|small|half|wide|phase|nothing}"
[[rule]]
select = "model.embed_tokens.weight"
to = "embed.weight"
operations = [{ op = "strip", size = 11, padded = 16 }]
[[rule]]
select = ["model.layers.{l}.a.weight", "model.layers.{l}.b.weight"]
to = "layers.{l}.wq.weight"
operations = [{ op = "transpose", order = [1, 0] }, { op = "fuse", sizes = [6, 2] }]
[[rule]]
select = "model.layers.{l}.input_layernorm.weight"
to = "layers.{l}.norm.weight"
[[rule]]
select = "model.{name:frozen.weight|scale|count|mask|small|half|wide|phase|nothing}"
to = "{name}"
"""
MASTERS = """
rest = "keep"
[[rule]]
select = "layers.{l}.norm.weight"
only = "param"
operations = [{ op = "cast", to = "float32", back = "float32" }]
"""
SPLIT = """
rest = "keep"
[[rule]]
select = "layers.{l}.wq.weight"
to = ["layers.{l}.q", "layers.{l}.k", "layers.{l}.v"]
operations = [
  { op = "split", heads = 4, kv_heads = 2, grouped = true },
  { op = "transpose", order = [1, 0] },
]
[[rule]]
select = "wide"
to = "wide.{n}"
operations = [{ op = "unstack" }]
"""


class Metered:
    """A checkpoint that notes the largest number of bytes that were asked for at once."""

    def __init__(self, source: Checkpoint) -> None:
        self.source, self.largest = source, 0
        self.url, self.tensors = source.url, source.tensors
        self.aliases, self.document = source.aliases, source.document

    def read_many(self, requests: Sequence[Request], *, into: Sequence[Array] | None = None) -> list[Array]:
        found = self.source.read_many(requests, into=into)
        self.largest = max(self.largest, sum(array.nbytes for array in found))
        return found


def _same(found: Readable, wanted: Readable, *, states: Sequence[str] | None = None) -> None:
    """Equal to the bit, in `states` or in all."""
    names = {n for n in wanted.tensors if states is None or n[1] in states}
    assert set(found.tensors) == names
    for name in names:
        info = wanted.tensors[name]
        assert found.tensors[name] == info, name
        box = Box.whole(info.shape)
        (one,), (other,) = found.read_many([(*name, box)]), wanted.read_many([(*name, box)])
        assert one.tobytes() == other.tobytes(), name


@pytest.mark.parametrize("limit", [16, 1 << 20])
def test_torch_distributed_and_back_is_the_whole_state(ours: Checkpoint, tmp_path: Path, limit: int) -> None:
    done = export_dcp(ours, open_store(str(tmp_path / "out")), limit=limit)
    back = open_checkpoint(str(tmp_path / "out"))
    _same(back, ours)
    assert (back.document, back.aliases) == (ours.document, ours.aliases)
    assert not list(differences(ours, back))
    assert done.bytes == sum(f.stat().st_size for f in (tmp_path / "out").iterdir())


def test_universal_and_back_is_the_training_state_with_master_weights(
    ours: Checkpoint, tmp_path: Path
) -> None:
    masters = as_theirs(ours, parse(MASTERS))
    export_ucp(ours, open_store(str(tmp_path / "out")), limit=64)
    back = open_checkpoint(str(tmp_path / "out"))
    _same(back, masters)
    assert back.document["step"] == 12
    assert back.aliases == ours.aliases
    assert back.document["optimizer"]["groups"] == ours.document["optimizer"]["groups"]
    assert back.document["optimizer"]["scalars"] == ours.document["optimizer"]["scalars"]


def test_hugging_face_and_back_through_one_specification(ours: Checkpoint, tmp_path: Path) -> None:
    theirs = as_theirs(ours, parse(LLAMA))
    done = export_hf(
        theirs, open_store(str(tmp_path / "out")), max_file_bytes=200, config={"model_type": "tiny"}, limit=64
    )
    back = open_checkpoint(str(tmp_path / "out"))
    assert back.document["foreign"]["config"] == {"model_type": "tiny"}
    embed = back.read("model.embed_tokens.weight", "param")
    assert embed.shape == (16, 4)
    assert not embed[11:].any()
    fused = ours.read("layers.0.wq.weight", "param")
    np.testing.assert_array_equal(back.read("model.layers.0.a.weight", "param"), fused[:6].T)
    _same(as_ours(back, parse(LLAMA)), ours, states=("param", "buffer"))
    assert as_ours(back, parse(LLAMA)).aliases == {"head.weight": "embed.weight"}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = [f for f in done.files if f.endswith(".safetensors")]
    assert len(files) > 2
    for file in files:
        with safe_open(tmp_path / "out" / file, "numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert {k for k, v in index["weight_map"].items() if v == file} == set(opened.keys())


def test_only_floating_tensors_are_cast(ours: Checkpoint, tmp_path: Path) -> None:
    export_hf(ours, open_store(str(tmp_path / "out")), dtype="bfloat16")
    back = open_checkpoint(str(tmp_path / "out"))
    wanted = ours.read("embed.weight", "param").astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(back.read("embed.weight", "param"), wanted)
    assert back.info("count", "param").dtype == "int64"
    assert back.info("phase", "param").dtype == "complex64"
    assert "head.weight" not in back


@pytest.mark.parametrize("export", [export_hf, export_dcp, export_ucp])
def test_memory_is_bounded_by_blocks(ours: Checkpoint, tmp_path: Path, export: Callable) -> None:
    source = Metered(ours)
    export(source, open_store(str(tmp_path / "out")), limit=48)
    assert 0 < source.largest <= 48


@pytest.mark.parametrize("export", [export_hf, export_dcp, export_ucp])
def test_nothing_is_written_over(ours: Checkpoint, tmp_path: Path, export: Callable) -> None:
    store = open_store(str(tmp_path / "out"))
    store.write("notes.txt", b"mine")
    with pytest.raises(ConfigError, match=r"isn't empty: it has notes\.txt"):
        export(ours, store)
    assert store.list() == ["notes.txt"]


def test_a_checkpoint_is_indexed_in_place_for_a_run(ours: Checkpoint, tmp_path: Path) -> None:
    export_hf(ours, open_store(str(tmp_path / "theirs")))
    spec = parse(SPLIT)
    store = open_store(str(tmp_path / "new"))
    stored = adopt(as_ours(open_checkpoint(str(tmp_path / "theirs")), spec), store, holder="test")
    assert stored.step == 0
    run = open_checkpoint(store.url)
    assert not [p for p in store.list() if p.endswith(".safetensors")]
    fused = ours.read("layers.0.wq.weight", "param")
    np.testing.assert_array_equal(
        run.read("layers.0.k", "param"), fused.reshape(2, 4, 4)[:, 2:3].reshape(2, 4).T
    )
    np.testing.assert_array_equal(
        run.read("layers.0.q", "param", Box((1, 0), (2, 4))), run["layers.0.q"]["param"][1:3]
    )
    np.testing.assert_array_equal(run.read("wide.0", "param"), ours.read("wide", "buffer")[0])
    with pytest.raises(ConfigError, match="has checkpoints already"):
        adopt(as_ours(ours, IDENTITY), store, holder="test")


def test_what_is_computed_must_be_copied(ours: Checkpoint, tmp_path: Path) -> None:
    spec = parse(MASTERS)
    store = open_store(str(tmp_path / "new"))
    with pytest.raises(TensorMismatch, match=r"it is cast to float32\. Copy it instead"):
        adopt(as_ours(ours, spec), store, holder="test")
    adopt(as_ours(ours, spec), store, holder="test", copy=True)
    _same(open_checkpoint(store.url), as_ours(ours, spec))
    assert open_checkpoint(store.url).document["cursor"] == ours.document["cursor"]


def test_ties_that_differ_are_refused(ours: Checkpoint, tmp_path: Path) -> None:
    spec = parse('rest = "keep"\nties = { "wide" = "count" }')
    with pytest.raises(TensorMismatch, match=r"wide \(buffer\) is said to be a copy of another tensor"):
        adopt(as_ours(ours, spec), open_store(str(tmp_path / "new")), holder="test")


def test_a_difference_is_found_at_its_element(ours: Checkpoint, tmp_path: Path) -> None:
    export_dcp(ours, open_store(str(tmp_path / "out")))
    start = next(r for r in _rows(tmp_path / "out") if r.tensor == "embed.weight" and r.state == "exp_avg")
    with (tmp_path / "out" / start.file).open("r+b") as file:
        file.seek(start.byte_offset + (3 * 4 + 2) * 4)
        file.write(np.float32(100).tobytes())
    (found,) = differences(ours, open_checkpoint(str(tmp_path / "out")))
    assert found.where == "embed.weight (exp_avg)"
    assert found.what.startswith("1 elements differ")
    assert found.what.endswith("the first at [3, 2]")


def _rows(directory: Path) -> list[Row]:
    checkpoint = open_checkpoint(str(directory))
    return checkpoint.manifest.rows(range(len(checkpoint.manifest)))
