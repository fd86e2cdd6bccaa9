"""Directories that Trainer, Accelerate and Lightning wrote: what is in them is restored or said.

The fixture holds what transformers 5.24, accelerate 1.15 and lightning 2.6 wrote, beside each the state that
was in memory.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.checkpoint.verify import verify
from elastic_train.cli.import_checkpoint import import_checkpoint
from elastic_train.errors import FormatUnsupported, NoCheckpoint, TensorMismatch

pytestmark = pytest.mark.ring1

FIXTURE = Path(__file__).parents[2] / "fixtures" / "training_directories_tiny.tar.gz"
NAMES = ("emb.weight", "inner.weight", "inner.bias", "norm.weight", "norm.bias", "head.weight", "head.bias")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("training")
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(target, filter="data")
    return target / "training_directories"


def truth(written: Path, name: str) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]]]:
    found = torch.load(written / f"{name}_truth.pt")
    return (found["model"], found["optimizer"]) if "model" in found else ({}, found)


def check_optimizer(checkpoint: Checkpoint, states: Mapping[str, Mapping[str, Any]], steps: int) -> None:
    document = checkpoint.document["optimizer"]
    assert {p for g in document["groups"] for p in g["params"]} == set(states)
    for fqn, own in states.items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert np.array_equal(checkpoint.read(fqn, name), own[name].numpy())
        assert document["scalars"][fqn]["step"]["value"] == steps


def test_a_trainers_directory_is_imported_with_names_from_its_configuration(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    import_checkpoint(str(written / "trainer"), run, spec=None, copy=True, show=False)
    said = capsys.readouterr().out
    checkpoint = open_checkpoint(run)
    assert checkpoint.document["step"] == 4
    _, states = truth(written, "trainer")
    check_optimizer(checkpoint, states, 4)
    groups = checkpoint.document["optimizer"]["groups"]
    assert [g["hyperparameters"]["weight_decay"] for g in groups] == [0.1, 0.0]
    assert all("norm" in fqn for fqn in groups[1]["params"])
    for name in ("scheduler.pt", "training_args.bin", "rng_state.pth", "trainer_state.json"):
        assert f"not restored: {name}" in said
    assert "assumed: the optimizer numbers its parameters" in said
    assert verify(checkpoint).sound


def test_a_trainers_optimizer_without_names_is_left_out_and_said(written: Path) -> None:
    checkpoint = open_checkpoint(str(written / "trainer"))
    assert checkpoint.document["step"] == 4
    assert not checkpoint.document["optimizer"]["states"]
    assert any(
        line.startswith("optimizer.pt") and "--names" in line
        for line in checkpoint.document["foreign"]["not_restored"]
    )
    assert checkpoint.document["foreign"]["lr_scheduler"]["last_epoch"] == 4


@pytest.mark.parametrize("kind", ["acc_safe", "acc_bin"])
def test_accelerates_directory_reads_equal(written: Path, kind: str) -> None:
    model, states = truth(written, kind)
    checkpoint = open_checkpoint(str(written / kind), names=NAMES if kind == "acc_safe" else None)
    for fqn, value in model.items():
        assert np.array_equal(checkpoint.read(fqn, "param"), value.numpy())
    check_optimizer(checkpoint, states, 4)
    assert checkpoint.document["step"] == 4
    lost = checkpoint.document["foreign"]["not_restored"]
    assert any("random_states_0.pkl" in line for line in lost)
    assert any("scheduler.bin" in line for line in lost)


def test_lightnings_file_reads_equal_and_names_its_own_objects(written: Path) -> None:
    model, states = truth(written, "lightning")
    path = str(written / "lightning.ckpt")
    for names in (None, [f"net.{name}" for name in NAMES]):
        checkpoint = open_checkpoint(path, names=names)
        for fqn, value in model.items():
            assert np.array_equal(checkpoint.read(fqn, "param"), value.numpy())
        lost = checkpoint.document["foreign"]["not_restored"]
        assert "hyper_parameters.cfg: a omegaconf.dictconfig.DictConfig" in lost
        assert checkpoint.document["step"] == 4
        if names is None:
            assert any("--names" in line for line in lost)
        else:
            check_optimizer(checkpoint, states, 4)


def test_names_of_another_model_are_refused(written: Path, tmp_path: Path) -> None:
    with pytest.raises(TensorMismatch, match=r"other\.weight"):
        open_checkpoint(str(written / "acc_safe"), names=["other.weight", *NAMES[1:]])
    swapped = [NAMES[0], NAMES[2], NAMES[1], *NAMES[3:]]
    lost = open_checkpoint(str(written / "acc_safe"), names=swapped).document["foreign"]["not_restored"]
    assert any("don't fit" in line for line in lost)
    (tmp_path / "names.json").write_text(json.dumps(NAMES))
    run = str(tmp_path / "run")
    names = str(tmp_path / "names.json")
    import_checkpoint(str(written / "acc_safe"), run, spec=None, copy=False, show=False, names=names)
    assert len(open_checkpoint(run).document["optimizer"]["states"]) == 2 * len(NAMES)


def test_numbers_are_told_by_shapes_where_each_has_its_own(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save({"net": net.state_dict(), "opt": optimizer.state_dict(), "epoch": 2}, tmp_path / "x.pt.tar")
    checkpoint = open_checkpoint(str(tmp_path / "x.pt.tar"))
    states = {name: optimizer.state[p] for name, p in net.named_parameters()}
    check_optimizer(checkpoint, states, 1)
    assert checkpoint.document["foreign"]["client_state"] == {"epoch": 2}
    square = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    other = torch.optim.SGD(square.parameters(), momentum=0.9)
    square(torch.ones(2)).sum().backward()
    other.step()
    torch.save({"model": square.state_dict(), "optimizer": other.state_dict()}, tmp_path / "y.pt")
    with pytest.raises(FormatUnsupported, match="--names"):
        open_checkpoint(str(tmp_path / "y.pt"))


@pytest.mark.parametrize(
    "name", ["checkpoint.pt", "model.pth", "state.ckpt", "best.pt.tar", "pytorch_model.bin"]
)
def test_the_one_model_in_a_directory_of_ray_train_is_opened(tmp_path: Path, name: str) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 1}, tmp_path / "x.pt")
    inner = tmp_path / "run" / "TorchTrainer_1" / "checkpoint_000000"
    inner.mkdir(parents=True)
    value = {"w": torch.ones(2)}
    torch.save(value if name == "pytorch_model.bin" else {"model": value}, inner / name)
    (inner / ".metadata.json").write_text("{}")
    assert (open_checkpoint(str(inner)).read("w", "param") == 1).all()
    for above in (tmp_path / "run", tmp_path / "run" / "TorchTrainer_1"):
        with pytest.raises(NoCheckpoint, match="checkpoint_000000"):
            open_checkpoint(str(above))


def test_files_beside_weights_say_that_they_are_no_model(written: Path) -> None:
    for name in ("optimizer.pt", "rng_state.pth", "training_args.bin"):
        with pytest.raises(NoCheckpoint, match="Open the directory"):
            open_checkpoint(str(written / "trainer" / name))


def test_a_directory_of_checkpoints_names_the_newest(written: Path, tmp_path: Path) -> None:
    for step in (20, 100, 3):
        shutil.copytree(written / "trainer", tmp_path / f"checkpoint-{step}")
    with pytest.raises(NoCheckpoint, match=r"Name the directory.*-100, .*-20, .*-3\."):
        open_checkpoint(str(tmp_path))
