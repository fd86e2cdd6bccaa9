"""Where a zip's bytes are is read from its headers, which have to agree; sums are compared before sealing."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file

from elastic_train.checkpoint.import_run import adopt
from elastic_train.checkpoint.language.specification import IDENTITY
from elastic_train.checkpoint.language.translated_view import as_ours
from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.checkpoint.verify import verify
from elastic_train.errors import ChecksumMismatch, FormatUnsupported
from elastic_train.storage.fsspec_store import open_store

pytestmark = pytest.mark.ring1

CENTRAL, LOCAL = b"PK\x01\x02", b"PK\x03\x04"


def saved(path: Path) -> bytearray:
    torch.save({"w": torch.arange(64.0), "b": torch.ones(64)}, path)
    return bytearray(path.read_bytes())


def places(data: bytearray) -> dict[str, tuple[int, int, int]]:
    """Entry -> its record in the table of contents, its header, and the first byte of its contents."""
    found: dict[str, tuple[int, int, int]] = {}
    at = data.index(CENTRAL)
    while data[at : at + 4] == CENTRAL:
        name, extra, comment = struct.unpack_from("<HHH", data, at + 28)
        header = struct.unpack_from("<L", data, at + 42)[0]
        local_name, local_extra = struct.unpack_from("<HH", data, header + 26)
        text = data[at + 46 : at + 46 + name].decode().partition("/")[2]
        found[text] = (at, header, header + 30 + local_name + local_extra)
        at += 46 + name + extra + comment
    return found


def test_a_header_that_is_another_entrys_is_refused(tmp_path: Path) -> None:
    data = saved(tmp_path / "x.pt")
    found = places(data)
    one, other = found["data/0"], found["data/1"]
    for record, header in ((one[0], other[1]), (other[0], one[1])):
        struct.pack_into("<L", data, record + 42, header)
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(ChecksumMismatch, match="differ"):
        open_checkpoint(str(tmp_path / "x.pt"))


def test_a_header_that_moves_the_contents_is_believed_and_bounded(tmp_path: Path) -> None:
    data = saved(tmp_path / "x.pt")
    _, header, _ = places(data)["data/0"]
    extra = struct.unpack_from("<H", data, header + 28)[0]
    struct.pack_into("<H", data, header + 28, extra + 4)
    (tmp_path / "x.pt").write_bytes(data)
    problems = verify(open_checkpoint(str(tmp_path / "x.pt"))).problems
    assert any("data/0" in p and "aren't the ones written" in p for p in problems)
    struct.pack_into("<H", data, header + 28, 60_000)
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(ChecksumMismatch, match="where it should be"):
        open_checkpoint(str(tmp_path / "x.pt"))


def test_one_name_twice_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(8.0)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt", "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("x/data/0", b"\0" * 32)
    with pytest.raises(ChecksumMismatch, match="twice"):
        open_checkpoint(str(tmp_path / "x.pt"))


def test_a_storage_of_another_size_than_its_elements_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(8.0)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / "y.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name) + (b"\0" * 4 if name.endswith("data/0") else b""))
    with pytest.raises(ChecksumMismatch, match="should have 8 elements"):
        open_checkpoint(str(tmp_path / "y.pt"))


def test_a_flipped_bit_is_found_by_verify_and_never_sealed(tmp_path: Path) -> None:
    data = saved(tmp_path / "x.pt")
    data[places(data)["data/0"][2] + 131] ^= 0x40
    (tmp_path / "x.pt").write_bytes(data)
    checkpoint = open_checkpoint(str(tmp_path / "x.pt"))
    assert any("data/0" in problem for problem in verify(checkpoint).problems)
    with pytest.raises(ChecksumMismatch, match="aren't the ones written"):
        adopt(as_ours(checkpoint, IDENTITY), open_store(str(tmp_path / "run")), holder="test", copy=True)
    assert not list(tmp_path.glob("run/commits/*"))


def test_verify_of_a_run_that_points_at_foreign_files_looks_into_them(tmp_path: Path) -> None:
    data = saved(tmp_path / "x.pt")
    run = str(tmp_path / "run")
    adopt(as_ours(open_checkpoint(str(tmp_path / "x.pt")), IDENTITY), open_store(run), holder="test")
    assert verify(open_checkpoint(run)).sound
    data[places(data)["data/1"][2]] ^= 1
    (tmp_path / "x.pt").write_bytes(data)
    assert any("data/1" in problem for problem in verify(open_checkpoint(run)).problems)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_flipped_bit_in_a_block_of_torch_distributed_is_found(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(3000.0)}, checkpoint_id=str(tmp_path / "dcp"))
    assert verify(open_checkpoint(str(tmp_path / "dcp"))).sound
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(np.arange(3000.0, dtype=np.float32).tobytes()) + 5000] ^= 1
    file.write_bytes(data)
    assert any("w" in problem for problem in verify(open_checkpoint(str(tmp_path / "dcp"))).problems)


@pytest.mark.parametrize("change", ["longer", "overlap", "twice", "negative"])
def test_safetensors_whose_header_and_size_differ_are_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.arange(4.0), "b": np.arange(4.0)}, path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length]
    changed = {
        "longer": header,
        "overlap": header.replace(b"[32,64]", b"[0,32] "),
        "twice": header.replace(b'"b"', b'"a"'),
        "negative": header.replace(b"[32,64]", b"[-2,30]"),
    }[change]
    assert len(changed) == length
    path.write_bytes(data[:8] + changed + data[8 + length :] + (b"\0" if change == "longer" else b""))
    with pytest.raises(ChecksumMismatch):
        open_checkpoint(str(path))


def test_a_tensor_is_never_larger_than_its_file_allows(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1).expand(2**36)}, tmp_path / "x.pt")
    with pytest.raises(FormatUnsupported, match="contiguous"):
        open_checkpoint(str(tmp_path / "x.pt"))
    base = torch.zeros(2**21)
    torch.save({f"w{n}": base[n : n + 2**20] for n in range(200)}, tmp_path / "x.pt")
    with pytest.raises(FormatUnsupported, match="contiguous"):
        open_checkpoint(str(tmp_path / "x.pt"))
    torch.save({"w": torch.ones(3, 1).expand(3, 1000)}, tmp_path / "x.pt")
    assert (open_checkpoint(str(tmp_path / "x.pt")).read("w", "param") == 1).all()
