"""Nothing that a file names is run: what isn't on the list refuses the file, and says its name."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_train.checkpoint.importers.pickle_free import Opaque, TensorRef, unpickle
from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.errors import ChecksumMismatch, FormatUnsupported

pytestmark = pytest.mark.ring1


class Calls:
    """An object whose pickle calls something."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ((os.system, "touch {}"), "system"),
        ((eval, "open({!r}, 'w')"), "eval"),
        ((subprocess.check_call, ["touch", "{}"]), "check_call"),
        ((getattr, "", "join"), "getattr"),
        ((torch.load, "{}"), "load"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_malicious_file_is_refused_by_name_and_nothing_runs(
    tmp_path: Path, call: tuple[Any, ...], name: str, protocol: int
) -> None:
    marker = tmp_path / "ran"
    function, *arguments = (
        a.format(marker)
        if isinstance(a, str)
        else [b.format(marker) for b in a]
        if isinstance(a, list)
        else a
        for a in call
    )
    data = {"model": {"w": torch.zeros(2)}, "evil": Calls(function, *arguments)}
    torch.save(data, tmp_path / "evil.pt", pickle_protocol=protocol)
    with pytest.raises((FormatUnsupported, ChecksumMismatch), match=name):
        open_checkpoint(str(tmp_path / "evil.pt"))
    assert not marker.exists()


def test_objects_of_known_packages_are_inert_and_said_to_be_left_out(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    data = {"model": {"w": torch.zeros(2)}, "note": Calls(Path.touch, marker)}
    torch.save(data, tmp_path / "note.pt", pickle_protocol=4)
    checkpoint = open_checkpoint(str(tmp_path / "note.pt"))
    assert not marker.exists()
    named = f"note: a {Path.touch.__module__}.Path.touch"  # pathlib._local in Python 3.13
    assert named in checkpoint.document["foreign"]["not_restored"]


def test_a_malicious_file_in_a_deepspeed_checkpoint_is_refused(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    root = copied("z1/global_step4")
    evil = {"param_shapes": [], "module": {}, "note": Calls(os.system, f"touch {tmp_path / 'ran'}")}
    torch.save(evil, root / "mp_rank_00_model_states.pt")
    with pytest.raises(FormatUnsupported, match=r"posix\.system"):
        open_checkpoint(str(root))
    assert not (tmp_path / "ran").exists()


def test_a_file_cannot_change_what_the_next_one_is_read_with() -> None:
    # BUILD with a pair (None, attributes) sets attributes on whatever the file names
    attack = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x0b\x00\x00\x00__kwdefaults__}s\x86b."
    with pytest.raises(ChecksumMismatch):
        unpickle(attack, url="x")
    on_class = b"\x80\x02ctorch\nTensor\nN}X\x03\x00\x00\x00getK\x01s\x86b."
    with pytest.raises(ChecksumMismatch):
        unpickle(on_class, url="x")
    assert callable(Opaque().get)
    assert unpickle(b"\x80\x02ctorch\nSize\n)R.", url="x") == ()


def test_plain_values_come_back_equal() -> None:
    value = {"a": [1, 2.5, None, True, "ü", 2**70], "b": (b"\x00\xff", {3: {4}}), "c": OrderedDict(x=1)}
    for protocol in (2, 3, 4, 5):
        assert unpickle(pickle.dumps(value, protocol=protocol), url="x") == value


def test_numpy_numbers_become_numbers_and_arrays_stay_closed() -> None:
    found = unpickle(pickle.dumps({"lr": np.float64(1e-3), "n": np.int32(-7), "a": np.arange(3)}), url="x")
    assert (found["lr"], found["n"]) == (1e-3, -7)
    assert isinstance(found["a"], Opaque)


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x02", b"\x80\x02K", b"\x80\x63K\x01.", b"garbage", b"\x80\x02(K\x01t"]
)
def test_what_is_no_pickle_is_damaged(data: bytes) -> None:
    with pytest.raises(ChecksumMismatch):
        unpickle(data, url="x")


def test_a_tensor_that_reaches_before_its_storage_is_refused() -> None:
    def tensor(offset: int) -> bytes:
        storage = b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI2\ntQ"
        return b"ctorch._utils\n_rebuild_tensor_v2\n(%bI%d\n(I2\nt(I1\ntI00\nNtR." % (storage, offset)

    assert unpickle(tensor(0), url="x").shape == (2,)
    with pytest.raises(ChecksumMismatch):
        unpickle(tensor(-4), url="x")


def test_tensors_become_references(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(6.0).reshape(2, 3).t()}, tmp_path / "w.pt")
    with torch.serialization.safe_globals([]):
        data = torch._C.PyTorchFileReader(str(tmp_path / "w.pt")).get_record("data.pkl")
    ref = unpickle(data, url="x")["w"]
    assert isinstance(ref, TensorRef)
    assert (ref.dtype, ref.shape, ref.strides) == ("float32", (3, 2), (1, 3))
