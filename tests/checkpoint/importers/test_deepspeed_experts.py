"""Experts that DeepSpeed divided among ranks: all values are to the bit those that its engine held."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from elastic_train.checkpoint.exporters.dcp import export_dcp
from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.checkpoint.verify import verify
from elastic_train.errors import ElasticTrainError, FormatUnsupported, FragmentMissing
from elastic_train.storage.fsspec_store import open_store

pytestmark = pytest.mark.ring1

ACCOUNT = 2
"""Lines of what is never restored: the position in the data, random states."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("experts")
    with tarfile.open(Path(__file__).parents[2] / "fixtures/deepspeed_moe_tiny.tar.gz") as archive:
        archive.extractall(target, filter="data")
    return target


CASES = ("moe1", "moe2", "moe1_data_first", "auto1", "auto2", "auto3")


@pytest.mark.parametrize("name", CASES)
def test_all_is_to_the_bit_what_the_engine_held(written: Path, tmp_path: Path, name: str) -> None:
    checkpoint = open_checkpoint(str(written / name))
    truth = load_file(written / name / "truth.safetensors")
    for key, value in truth.items():
        tensor, _, state = key.rpartition(":")
        read = checkpoint.read(tensor, state)
        assert (read.shape, read.tobytes()) == (value.shape, value.tobytes()), key
    others = {key for key in checkpoint.tensors if ":".join(key) not in truth}
    if name.startswith("moe"):  # each expert has values of its own
        assert {t.rpartition(".")[2] for t, _ in others} == {"shift", "scale"}
        found = {checkpoint.read(*key).tobytes() for key in others}
        assert len(found) == len(others) == 16
        assert {s for t, s in others if t.endswith("scale")} == {"buffer"}
    else:
        assert not others
    trained = {key.rpartition(":")[0] for key in truth}
    assert set(checkpoint.document["trainable"]) == trained
    assert len(checkpoint.document["foreign"]["not_restored"]) == ACCOUNT
    assert checkpoint.document["step"] == 4
    assert verify(checkpoint).sound
    export_dcp(checkpoint, open_store(str(tmp_path / "dcp")))
    back = open_checkpoint(str(tmp_path / "dcp"))
    assert back.tensors == checkpoint.tensors
    assert all(back.read(*key).tobytes() == checkpoint.read(*key).tobytes() for key in back.tensors)


def an_expert_gone(tag: Path) -> None:
    (tag / "layer_1_expert_2_mp_rank_00_model_states.pt").unlink()


def the_last_expert_gone(tag: Path) -> None:
    (tag / "layer_0_expert_3_mp_rank_00_model_states.pt").unlink()


def a_layer_gone(tag: Path) -> None:
    for path in tag.glob("layer_1_*"):
        path.unlink()


def experts_exchanged(tag: Path) -> None:
    one, other = (tag / f"layer_0_expert_{n}_mp_rank_00_model_states.pt" for n in (0, 1))
    shutil.copy(other, one)


def a_rank_gone(tag: Path) -> None:
    (tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()


def rewrite(path: Path, change: Callable[[dict[str, object]], None]) -> None:
    tree = torch.load(path, weights_only=False)
    change(tree)
    torch.save(tree, path)


def another_count(tag: Path) -> None:
    rewrite(tag / "mp_rank_00_model_states.pt", lambda tree: tree.update(num_experts=[4, 10**12]))


def no_zero(tag: Path) -> None:
    (tag / "expp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")


def model_parallel(tag: Path) -> None:
    one = tag / "layer_0_expert_0_mp_rank_00_model_states.pt"
    shutil.copy(one, tag / "layer_0_expert_0_mp_rank_01_model_states.pt")


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        (an_expert_gone, FragmentMissing, "expert 2"),
        (the_last_expert_gone, FragmentMissing, "expert 3"),
        (a_layer_gone, ElasticTrainError, "second"),
        (experts_exchanged, FormatUnsupported, "expert 0"),
        (a_rank_gone, FragmentMissing, "1"),
        (another_count, FragmentMissing, "1000000000000 experts"),
        (no_zero, FormatUnsupported, "without ZeRO"),
        (model_parallel, FormatUnsupported, "model-parallel"),
    ],
)
def test_what_is_not_whole_is_refused(
    written: Path, tmp_path: Path, damage: Callable[[Path], None], kind: type[Exception], words: str
) -> None:
    tag = Path(shutil.copytree(written / "moe1", tmp_path / "moe1")) / "global_step4"
    damage(tag)
    with pytest.raises(kind, match=words):
        open_checkpoint(str(tmp_path / "moe1"))


def test_a_replica_of_an_expert_is_refused(written: Path, tmp_path: Path) -> None:
    tag = Path(shutil.copytree(written / "auto3", tmp_path / "auto3")) / "global_step4"

    def twice(tree: dict[str, object]) -> None:
        layers = tree["ds_autoep_layers"]
        assert isinstance(layers, list)
        for layer in layers:
            layer["expert_placement"]["ranks"][1]["experts"] = [1, 2, 3]

    rewrite(tag / "zero_pp_rank_0_mp_rank_00_model_states.pt", twice)
    with pytest.raises(FormatUnsupported, match="one rank each"):
        open_checkpoint(str(tmp_path / "auto3"))
