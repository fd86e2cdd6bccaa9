"""Where it can't be told what is meant, the choices are listed; nothing is chosen in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.errors import CheckpointError, FormatUnsupported, FragmentMissing, NoCheckpoint

pytestmark = pytest.mark.ring1

ONE, OTHER = {"w": np.zeros(4), "b": np.zeros(2)}, {"w": np.ones(4), "b": np.ones(2)}


def two_versions(at: Path) -> None:
    save_file(ONE, at / "step1000.safetensors")
    save_file(OTHER, at / "step2000.safetensors")


def two_models(at: Path) -> None:
    save_file({"a": np.zeros(1)}, at / "vae.safetensors")
    save_file({"b": np.zeros(1)}, at / "unet.safetensors")


def parts_with_one_name_twice(at: Path) -> None:
    save_file(ONE, at / "model-00001-of-00002.safetensors")
    save_file(OTHER, at / "model-00002-of-00002.safetensors")


def a_part_missing(at: Path) -> None:
    save_file({"a": np.zeros(1)}, at / "model-00001-of-00003.safetensors")
    save_file({"b": np.zeros(1)}, at / "model-00002-of-00003.safetensors")


def whole_and_index(at: Path) -> None:
    save_file(ONE, at / "model.safetensors")
    save_file(OTHER, at / "model-00001-of-00001.safetensors")
    listed = {"weight_map": dict.fromkeys(OTHER, "model-00001-of-00001.safetensors")}
    (at / "model.safetensors.index.json").write_text(json.dumps(listed))


def two_files_of_torch(at: Path) -> None:
    torch.save({"w": torch.zeros(2)}, at / "last.pt")
    torch.save({"w": torch.ones(2)}, at / "best.pt")


def weights_and_a_file_of_torch(at: Path) -> None:
    save_file(ONE, at / "weights.safetensors")
    torch.save({"model": {"w": torch.ones(2)}}, at / "checkpoint.pt")


def tags_without_a_pointer(at: Path) -> None:
    for tag in ("global_step4", "global_step8"):
        (at / tag).mkdir()
        torch.save({"module": {}}, at / tag / "mp_rank_00_model_states.pt")


@pytest.mark.parametrize(
    ("write", "choices"),
    [
        (two_versions, ("step1000.safetensors", "step2000.safetensors")),
        (two_models, ("vae.safetensors", "unet.safetensors")),
        (parts_with_one_name_twice, ("model-00001-of-00002", "model-00002-of-00002")),
        (a_part_missing, ("model-00001-of-00003", "model-00002-of-00003")),
        (whole_and_index, ("model.safetensors", "model.safetensors.index.json")),
        (two_files_of_torch, ("last.pt", "best.pt")),
        (weights_and_a_file_of_torch, ("weights.safetensors", "checkpoint.pt")),
        (tags_without_a_pointer, ("global_step4", "global_step8")),
    ],
)
def test_an_ambiguity_lists_the_choices(
    tmp_path: Path, write: Callable[[Path], None], choices: tuple[str, ...]
) -> None:
    write(tmp_path)
    with pytest.raises(NoCheckpoint) as caught:
        open_checkpoint(str(tmp_path))
    assert all(choice in str(caught.value) for choice in choices)


def test_parts_of_one_series_are_one_model_and_that_is_said(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": np.ones(1)}, tmp_path / "model-00002-of-00002.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    assert set(checkpoint) == {"a", "b"}
    assert any("no index" in line for line in checkpoint.document["foreign"]["assumed"])


def test_other_weights_beside_the_model_are_said(tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "model.safetensors")
    save_file(OTHER, tmp_path / "ema.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    assert (checkpoint.read("w", "param") == 0).all()
    assert any("ema.safetensors" in line for line in checkpoint.document["foreign"]["not_restored"])


def test_weights_of_torch_in_parts_read_equal(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.ones(2)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    listed = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": listed}))
    assert (open_checkpoint(str(tmp_path)).read("b", "param") == 1).all()
    index.write_text(json.dumps({"weight_map": listed | {"c": "pytorch_model-00002-of-00002.bin"}}))
    with pytest.raises(FragmentMissing, match="should hold c"):
        open_checkpoint(str(tmp_path))


def test_several_models_in_one_file_are_refused_by_name(tmp_path: Path) -> None:
    net = {"w": torch.ones(2)}
    for value in ({"generator": net, "discriminator": net}, {"model": net, "state_dict": net}):
        torch.save(value, tmp_path / "x.pt")
        with pytest.raises(FormatUnsupported) as caught:
            open_checkpoint(str(tmp_path / "x.pt"))
        assert all(name in str(caught.value) for name in value)


def test_a_submodule_called_module_keeps_its_name(tmp_path: Path) -> None:
    names = ("emb.weight", "module.weight", "inner.module.bias")
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "x.pt")
    assert set(open_checkpoint(str(tmp_path / "x.pt"))) == set(names)
    torch.save({f"module.{name}": torch.ones(2) for name in names}, tmp_path / "x.pt")
    wrapped = open_checkpoint(str(tmp_path / "x.pt"))
    assert set(wrapped) == set(names)
    assert any("module." in line for line in wrapped.document["foreign"]["assumed"])


@pytest.mark.parametrize("number", ["99999999999", "9" * 200])
def test_ranks_of_any_number_cost_nothing(tmp_path: Path, number: str) -> None:
    for rank in ("0", number):
        torch.save({"module": {}}, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="missing"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "manifest.ocdbt"])
def test_a_checkpoint_of_orbax_is_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    """The names are those that orbax-checkpoint 0.12.8 gives."""
    for path in ("4/_CHECKPOINT_METADATA", f"4/state/{name}", "4/state/d/64dade53f6620fd51c18c0c1aa4228af"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"{}")
    for inner in ("4", "4/state"):
        with pytest.raises(FormatUnsupported, match=r"it is Orbax's.*save it with safetensors"):
            open_checkpoint(str(tmp_path / inner))
    with pytest.raises(NoCheckpoint, match=r"Name the directory that is meant: .*/4"):
        open_checkpoint(str(tmp_path))
