"""Tensors that are more than a view of a storage are refused by their name, or read right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.errors import FormatUnsupported

pytestmark = pytest.mark.ring1


class Tagged(torch.Tensor):
    """A class of its own."""


ODD: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "conj": (lambda: torch.complex(torch.ones(2), torch.ones(2)).conj(), "conjugated"),
    "neg": (lambda: torch.complex(torch.ones(2), torch.ones(2)).conj().imag, "negated"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "sparse"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "quantized"),
    "meta": (lambda: torch.empty(3, device="meta"), "without data"),
    "complex128": (lambda: torch.ones(2, dtype=torch.complex128), "complex128"),
    "fnuz": (lambda: torch.ones(2).to(torch.float8_e4m3fnuz), "float8_e4m3fnuz"),
    "subclass": (lambda: torch.ones(2).as_subclass(Tagged), "Tagged"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("alone", [True, False])
def test_an_odd_tensor_of_the_model_is_refused_by_name(tmp_path: Path, kind: str, alone: bool) -> None:
    make, word = ODD[kind]
    rest = {} if alone else {"anchor": torch.ones(2)}
    torch.save({"layer.weight": make(), **rest}, tmp_path / "x.pt")
    with pytest.raises(FormatUnsupported, match=word) as caught:
        open_checkpoint(str(tmp_path / "x.pt"))
    assert "layer.weight" in str(caught.value)


def test_odd_tensors_beside_the_model_are_listed(tmp_path: Path) -> None:
    torch.save(
        {"model": {"w": torch.ones(2)}, "mask": ODD["sparse"][0](), "z": ODD["conj"][0]()}, tmp_path / "x.pt"
    )
    lost = open_checkpoint(str(tmp_path / "x.pt")).document["foreign"]["not_restored"]
    assert "mask: a sparse tensor" in lost
    assert "z: a conjugated view" in lost


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_conjugated_view_in_torch_distributed_is_refused_by_name(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2), "z": ODD["conj"][0]()}, checkpoint_id=str(tmp_path))
    with pytest.raises(FormatUnsupported, match="z is a conjugated"):
        open_checkpoint(str(tmp_path))


def test_views_that_are_only_views_read_equal(tmp_path: Path) -> None:
    base = torch.randn(4, 6, dtype=torch.complex64)
    parameter = nn.Parameter(torch.randn(3))
    parameter.tag = "x"
    other = torch.randn(4, 6, dtype=torch.complex64)
    views = {
        "real": base.real,
        "imag": other.imag,
        "t": torch.randn(3, 2).t(),
        "p": parameter,
        "b": nn.Buffer(torch.randn(2)),
    }
    torch.save(views, tmp_path / "x.pt")
    checkpoint = open_checkpoint(str(tmp_path / "x.pt"))
    for name, value in views.items():
        assert np.array_equal(checkpoint.read(name, "param"), value.detach().numpy())
    assert "p: its attributes tag" in checkpoint.document["foreign"]["not_restored"]
