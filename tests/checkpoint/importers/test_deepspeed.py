"""DeepSpeed's files, read in place, hold what its own converter makes of them, and what it drops."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from elastic_train.checkpoint.account import account
from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.checkpoint.verify import verify
from elastic_train.geometry.box import Box

pytestmark = pytest.mark.ring1

ALL = ("z1", "z2", "z3", "f1", "f3", "p1", "p3", "b1", "b3", "q3")
STATES = ("param", "exp_avg", "exp_avg_sq")


def tag(root: Path) -> str:
    return (root / "latest").read_text()


def atoms(root: Path) -> dict[tuple[str, str], np.ndarray]:
    """What the converter wrote, read by torch; flat where it came from ZeRO-3."""
    found: dict[tuple[str, str], np.ndarray] = {}
    for path in (root / f"{tag(root)}_u" / "zero").glob("*/*.pt"):
        value = torch.load(path, weights_only=True)
        if path.stem != "step":
            tensor = value["param"] if isinstance(value, dict) else value
            state = "param" if path.stem == "fp32" else path.stem
            found[path.parent.name, state] = tensor.detach().numpy()
    return found


def everything(checkpoint: Checkpoint) -> dict[tuple[str, str], np.ndarray]:
    names = list(checkpoint.tensors)
    whole = [(t, s, Box.whole(checkpoint.info(t, s).shape)) for t, s in names]
    return dict(zip(names, checkpoint.read_many(whole), strict=True))


@pytest.mark.parametrize("name", ALL)
def test_every_tensor_is_bit_for_bit_the_one_of_the_converter(deepspeed: Path, name: str) -> None:
    checkpoint = open_checkpoint(str(deepspeed / name))
    expected = atoms(deepspeed / name)
    assert {(t, s) for t in checkpoint.document["trainable"] for s in STATES} <= expected.keys()
    for (tensor, state), array in expected.items():
        held = state if tensor != "scale" else "buffer"
        read = checkpoint.read(tensor, held)
        assert array.size == read.size
        if name == "b1" and tensor in ("pos.weight", "head.weight"):
            # what the optimizer does not hold the converter takes from the module, in bfloat16; ties too
            assert read.dtype.name == ("bfloat16" if tensor == "pos.weight" else "float32")
            read = read.astype(ml_dtypes.bfloat16).astype(np.float32)
        assert array.tobytes() == read.tobytes(), (tensor, state)
    assert verify(checkpoint).sound


@pytest.mark.parametrize("name", ALL)
def test_the_universal_directory_reads_as_the_checkpoint_it_was_made_of(deepspeed: Path, name: str) -> None:
    native = open_checkpoint(str(deepspeed / name))
    universal = open_checkpoint(str(deepspeed / name / f"{tag(deepspeed / name)}_u"))
    assert universal.tensors == native.tensors
    assert universal.aliases == native.aliases
    assert universal.document["optimizer"] == native.document["optimizer"]
    assert universal.document["step"] == native.document["step"]
    ours, theirs = everything(native), everything(universal)
    assert all(ours[key].tobytes() == theirs[key].tobytes() for key in ours)


@pytest.mark.parametrize("name", ["z1", "z3", "q3"])
def test_every_parameter_keeps_the_hyperparameters_of_its_own_group(deepspeed: Path, name: str) -> None:
    checkpoint = open_checkpoint(str(deepspeed / name))
    settings = {
        fqn: (group["hyperparameters"]["lr"], group["hyperparameters"]["weight_decay"])
        for group in checkpoint.document["optimizer"]["groups"]
        for fqn in group["params"]
    }
    parameters = {t: i.shape for (t, s), i in checkpoint.tensors.items() if s == "param"}
    assert settings == {fqn: (1e-3, 0.1) if len(s) > 1 else (5e-4, 0.0) for fqn, s in parameters.items()}


@pytest.mark.parametrize("name", ["f1", "f3"])
def test_frozen_parameters_buffers_and_ties_are_restored(deepspeed: Path, name: str) -> None:
    checkpoint = open_checkpoint(str(deepspeed / name))
    assert np.array_equal(checkpoint["pos.weight"]["param"][...], np.full((16, 32), 3, np.float32))
    assert list(checkpoint["pos.weight"]) == ["param"]
    assert np.array_equal(checkpoint["scale"]["buffer"][...], np.full(3, 7, np.float32))
    assert checkpoint.aliases == {"head.weight": "emb.weight"}
    assert "pos.weight" not in checkpoint.document["trainable"]
    for state in STATES:
        tied, owner = checkpoint.read("head.weight", state), checkpoint.read("emb.weight", state)
        assert tied.tobytes() == owner.tobytes()


def test_a_tied_tensor_reads_its_own_bytes_and_not_the_buffer_behind_it(deepspeed: Path) -> None:
    universal = open_checkpoint(str(deepspeed / "f1" / "global_step4_u"))
    before = universal.files.bytes_read
    universal.read("head.weight", "param")
    assert universal.files.bytes_read - before == 101 * 32 * 4


@pytest.mark.parametrize(("one", "other"), [("z1", "z3"), ("p1", "p3"), ("f1", "f3"), ("b1", "b3")])
def test_a_run_may_go_from_one_zero_stage_to_another(deepspeed: Path, one: str, other: str) -> None:
    first, second = open_checkpoint(str(deepspeed / one)), open_checkpoint(str(deepspeed / other))
    found = account(first.tensors, second.tensors)
    assert (found.absent, found.extra, found.mismatched) == ((), (), ())
    assert first.document["optimizer"] == second.document["optimizer"]


@pytest.mark.parametrize("name", ["p1", "p3"])
def test_any_box_is_read_through_padding_and_ranks(deepspeed: Path, name: str) -> None:
    checkpoint = open_checkpoint(str(deepspeed / name))
    whole = checkpoint.read("h.0.up.weight", "exp_avg")
    box = Box((50, 3), (60, 30))
    assert np.array_equal(checkpoint.read("h.0.up.weight", "exp_avg", box), whole[box.slices])


def test_the_document_says_what_a_run_needs_and_what_is_missing(deepspeed: Path) -> None:
    document = open_checkpoint(str(deepspeed / "z2")).document
    assert document["step"] == 4
    assert document["optimizer"]["class"] == "AdamW"
    assert document["optimizer"]["scalars"]["h.0.o.bias"] == {"step": {"value": 4.0, "dtype": "float32"}}
    assert ["h.0.o.bias", "exp_avg_sq"] in document["optimizer"]["states"]
    foreign = document["foreign"]
    assert foreign["system"] == "DeepSpeed ZeRO-2"
    assert foreign["client_state"] == {"cursor": 4}
    assert foreign["counters"] == {"global_steps": 4, "global_samples": 32, "skipped_steps": 0}
    assert any("position in the data" in said for said in foreign["not_restored"])


def test_the_tag_directory_opens_as_its_parent_does(deepspeed: Path) -> None:
    inside = open_checkpoint(str(deepspeed / "z1" / "global_step4"))
    assert inside.tensors == open_checkpoint(str(deepspeed / "z1")).tensors
