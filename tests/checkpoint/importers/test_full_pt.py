"""One file with a model and its optimizer: the forms in which torch gathers them read equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from elastic_train.checkpoint import ranges
from elastic_train.checkpoint.ranges import RangeIndex
from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.errors import FormatUnsupported, TensorMismatch
from elastic_train.geometry.box import Box

pytestmark = pytest.mark.ring1


def trained(*, named: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    wide = [(n, p) for n, p in model.named_parameters() if p.ndim > 1]
    thin = [(n, p) for n, p in model.named_parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": wide if named else [p for _, p in wide], "lr": 1e-3},
        {"params": thin if named else [p for _, p in thin], "lr": 2e-3, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def check(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The checkpoint holds exactly the live state."""
    for fqn, value in model.state_dict().items():
        assert np.array_equal(checkpoint.read(fqn, "param"), value.numpy())
    document = checkpoint.document["optimizer"]
    lr = {p: g["hyperparameters"]["lr"] for g in document["groups"] for p in g["params"]}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            fqn = next(n for n, p in model.named_parameters() if p is parameter)
            state = optimizer.state[parameter]
            for name in ("exp_avg", "exp_avg_sq"):
                assert np.array_equal(checkpoint.read(fqn, name), state[name].numpy())
                assert [fqn, name] in document["states"]
            assert document["scalars"][fqn]["step"] == {"value": 3.0, "dtype": "float32"}
            assert lr[fqn] == group["lr"]


@pytest.mark.parametrize("flatten", [False, True])
def test_state_dicts_by_name_read_equal(tmp_path: Path, flatten: bool) -> None:
    model, optimizer = trained()
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flatten)
    states = get_state_dict(model, optimizer, options=options)
    torch.save({"model": states[0], "optimizer": states[1], "step": 3, "note": "ü"}, tmp_path / "full.pt")
    checkpoint = open_checkpoint(str(tmp_path / "full.pt"))
    check(checkpoint, model, optimizer)
    assert checkpoint.document["step"] == 3
    assert checkpoint.document["foreign"]["client_state"] == {"step": 3, "note": "ü"}


def test_numbers_with_recorded_names_read_equal(tmp_path: Path) -> None:
    model, optimizer = trained(named=True)
    torch.save(
        {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()},
        tmp_path / "x.pt",
    )
    check(open_checkpoint(str(tmp_path / "x.pt")), model, optimizer)


def test_numbers_without_names_are_refused_with_the_remedy(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    with pytest.raises(FormatUnsupported, match="get_optimizer_state_dict"):
        open_checkpoint(str(tmp_path / "x.pt"))


def test_a_bare_state_dict_is_a_model_and_says_that_there_is_no_optimizer(tmp_path: Path) -> None:
    model, _ = trained()
    torch.save(model.state_dict(), tmp_path / "x.pt")
    checkpoint = open_checkpoint(str(tmp_path / "x.pt"))
    assert {t for t, _ in checkpoint.tensors} == set(model.state_dict())
    assert any("the optimizer" in said for said in checkpoint.document["foreign"]["not_restored"])


def test_names_that_wrappers_changed_are_the_plain_ones(tmp_path: Path) -> None:
    weights = {
        "module._orig_mod.a._checkpoint_wrapped_module.w": torch.ones(2),
        "b._fsdp_wrapped_module.w": torch.zeros(3),
    }
    torch.save({"state_dict": weights}, tmp_path / "x.pt")
    assert set(open_checkpoint(str(tmp_path / "x.pt"))) == {"a.w", "b.w"}
    torch.save({"state_dict": {"module.a": torch.ones(2), "a": torch.ones(2)}}, tmp_path / "x.pt")
    with pytest.raises(TensorMismatch, match="twice"):
        open_checkpoint(str(tmp_path / "x.pt"))


def test_every_dtype_and_layout_reads_equal(tmp_path: Path) -> None:
    torch.manual_seed(1)
    values = {
        "bf16": torch.randn(3, 4).bfloat16(),
        "fp8": torch.randn(5).to(torch.float8_e4m3fn),
        "half": torch.randn(2).half(),
        "u16": torch.tensor([1, 65535], dtype=torch.uint16),
        "bool": torch.tensor([True, False]),
        "int": torch.arange(-3, 3, dtype=torch.int8),
        "complex": torch.randn(3, dtype=torch.complex64),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "transposed": torch.randn(4, 6).t(),
        "strided": torch.randn(8, 8)[::2, 1:7:3],
    }
    torch.save(values, tmp_path / "x.pt")
    checkpoint = open_checkpoint(str(tmp_path / "x.pt"))
    for name, value in values.items():
        read = checkpoint.read(name, "param")
        assert read.shape == tuple(value.shape)
        assert read.tobytes() == value.contiguous().flatten().view(torch.uint8).numpy().tobytes(), name
    part = checkpoint["transposed"]["param"][2:5, 1]
    assert np.array_equal(part, values["transposed"][2:5, 1].numpy())


def test_large_tensors_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "MOST", 1000)
    values = {"dense": torch.randn(7, 300), "transposed": torch.randn(90, 40).t(), "flat": torch.randn(1001)}
    torch.save(values, tmp_path / "x.pt")
    checkpoint = open_checkpoint(str(tmp_path / "x.pt"))
    for name, value in values.items():
        whole = Box.whole(tuple(value.shape))
        reads = RangeIndex(checkpoint.manifest, url="x").reads([(name, "param", whole)])
        assert len(reads) > 3
        assert all(read.length <= 1000 for read in reads)
        assert np.array_equal(checkpoint.read(name, "param"), value.numpy())
    part = Box((1, 50), (5, 200))
    assert np.array_equal(checkpoint.read("dense", "param", part), values["dense"][1:6, 50:250].numpy())


def test_only_equal_ranges_of_a_buffer_are_ties(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    tied = flat[:4]
    views = {"a": tied, "b": tied, "c": flat[2:6], "d": flat[:4].view(2, 2), "e": flat[4:]}
    torch.save(views, tmp_path / "x.pt")
    checkpoint = open_checkpoint(str(tmp_path / "x.pt"))
    assert checkpoint.aliases == {"b": "a"}
    assert all(np.array_equal(checkpoint[n]["param"][...], v.numpy()) for n, v in views.items())


def test_a_dtype_that_the_format_has_no_word_for_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "x.pt")
    with pytest.raises(FormatUnsupported, match="complex128"):
        open_checkpoint(str(tmp_path / "x.pt"))


def test_an_optimizer_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    state = {
        "state": {"other.w": {"exp_avg": torch.zeros(2)}},
        "param_groups": [{"params": ["other.w"], "lr": 0.1}],
    }
    torch.save({"model": {"w": torch.zeros(2)}, "optimizer": state}, tmp_path / "x.pt")
    with pytest.raises(TensorMismatch, match=r"other\.w"):
        open_checkpoint(str(tmp_path / "x.pt"))
