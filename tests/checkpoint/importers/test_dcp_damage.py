"""Directories of torch.distributed.checkpoint and Hugging Face that are damaged or mean harm are refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.exporters.dcp import export_dcp
from elastic_train.checkpoint.exporters.hf import export_hf
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.checkpoint.writer import write_part
from elastic_train.errors import CheckpointError, ChecksumMismatch, FormatUnsupported, FragmentMissing
from elastic_train.geometry.box import Box
from elastic_train.storage.fsspec_store import open_store

pytestmark = pytest.mark.ring1


@pytest.fixture
def small(tmp_path: Path) -> Checkpoint:
    """Two tensors."""
    store = open_store(str(tmp_path / "ours"))
    pieces = [
        Piece(
            tensor=name,
            state="param",
            dtype="float32",
            shape=(6, 4),
            box=Box.whole((6, 4)),
            data=np.arange(24, dtype=np.float32).reshape(6, 4),
        )
        for name in ("first.weight", "second.weight")
    ]
    assemble(store, "c", [write_part(store, "c", 0, pieces)], {"step": 3})
    return Checkpoint.open(store, "c")


@pytest.fixture
def dcp(small: Checkpoint, tmp_path: Path) -> Path:
    export_dcp(small, open_store(str(tmp_path / "dcp")))
    return tmp_path / "dcp"


@pytest.fixture
def hf(small: Checkpoint, tmp_path: Path) -> Path:
    export_hf(small, open_store(str(tmp_path / "hf")), max_file_bytes=100)
    return tmp_path / "hf"


class Harm:
    """Pickles as a call that would leave a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.write_text, (self.target, "harmed")


def test_a_metadata_file_that_calls_something_is_refused_and_calls_nothing(dcp: Path, tmp_path: Path) -> None:
    (dcp / ".metadata").write_bytes(pickle.dumps(Harm(tmp_path / "harmed")))
    with pytest.raises(CheckpointError):
        open_checkpoint(str(dcp))
    assert not (tmp_path / "harmed").exists()


def test_metadata_that_calls_by_name_is_refused_with_the_name(dcp: Path) -> None:
    (dcp / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(FormatUnsupported, match=r"it names os\.system, .* was not run"):
        open_checkpoint(str(dcp))


def test_a_path_out_of_the_directory_is_refused(dcp: Path) -> None:
    data = (dcp / ".metadata").read_bytes()
    (dcp / ".metadata").write_bytes(data.replace(b"__0_0.distcp", b"../../secret"))
    with pytest.raises(ChecksumMismatch, match=r"'\.\./\.\./secret', which isn't inside"):
        open_checkpoint(str(dcp))


def test_a_truncated_file_is_refused_when_it_is_opened(dcp: Path) -> None:
    file = dcp / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ChecksumMismatch, match="the file is truncated"):
        open_checkpoint(str(dcp))


def test_a_file_that_is_gone_is_named(dcp: Path) -> None:
    (dcp / "__0_0.distcp").unlink()
    with pytest.raises(FragmentMissing, match=r"__0_0\.distcp: the file is gone"):
        open_checkpoint(str(dcp))


def test_bytes_of_another_kind_are_refused(dcp: Path) -> None:
    file = dcp / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError):
        open_checkpoint(str(dcp))


@pytest.mark.parametrize("length", [0, 4, 8, 100])
def test_a_truncated_safetensors_file_is_refused(hf: Path, length: int) -> None:
    file = hf / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ChecksumMismatch, match="the file is truncated or damaged"):
        open_checkpoint(str(hf))


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"dtype": "F32", "shape": [6, 4], "data_offsets": [0, 95]}, "has 95 bytes, not 96"),
        ({"dtype": "F32", "shape": [6, 4], "data_offsets": [4, 100]}, "ends at byte"),
        ({"dtype": "F4", "shape": [6, 4], "data_offsets": [0, 12]}, "has the dtype 'F4'"),
        ({"dtype": "F32", "shape": [-6, -4], "data_offsets": [0, 96]}, "describes first.weight by"),
        ({"dtype": "F32"}, "describes first.weight by"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path: Path, entry: dict, problem: str) -> None:
    header = json.dumps({"first.weight": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(96)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=problem):
        open_checkpoint(str(tmp_path))


def test_an_index_is_held_to_its_files(hf: Path) -> None:
    index = hf / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["frist.weight"] = listed["weight_map"].pop("first.weight")
    index.write_text(json.dumps(listed))
    with pytest.raises(FragmentMissing, match=r"should hold frist\.weight .* did you mean first\.weight"):
        open_checkpoint(str(hf))
    listed["weight_map"] = {"first.weight": "../hf/model-00001-of-00002.safetensors"}
    index.write_text(json.dumps(listed))
    with pytest.raises(ChecksumMismatch, match="the index can't be used"):
        open_checkpoint(str(hf))


def test_one_file_of_an_index_opens_alone(hf: Path, small: Checkpoint) -> None:
    one = open_checkpoint(str(hf / "model-00001-of-00002.safetensors"))
    assert list(one.tensors) == [("first.weight", "param")]
    np.testing.assert_array_equal(
        one["first.weight"]["param"][2:4, 1], small["first.weight"]["param"][2:4, 1]
    )
