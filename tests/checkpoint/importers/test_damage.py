"""What is missing, changed places or is of another checkpoint is found when it is opened, and named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.errors import (
    CheckpointError,
    ChecksumMismatch,
    FormatUnsupported,
    FragmentMissing,
    NoCheckpoint,
    TensorMismatch,
)

pytestmark = pytest.mark.ring1

MODEL = "mp_rank_00_model_states.pt"
MODEL3 = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    """One bit in the index of a file of torch.save, whose bytes begin soon after its name."""
    data = bytearray(path.read_bytes())
    data[data.index(b"_rebuild_tensor") + 3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("checkpoint", "file", "damage", "error"),
    [
        ("z1", MODEL, halve, ChecksumMismatch),
        ("z1", OPTIM.format(1), halve, ChecksumMismatch),
        ("z3", OPTIM.format(0), empty, ChecksumMismatch),
        ("z3", MODEL3.format(1), flip, ChecksumMismatch),
        ("z1", MODEL, Path.unlink, FragmentMissing),
        ("z1", OPTIM.format(1), Path.unlink, FragmentMissing),
        ("z2", OPTIM.format(0), Path.unlink, FragmentMissing),
        ("z3", OPTIM.format(1), Path.unlink, FragmentMissing),
        ("z3", MODEL3.format(1), Path.unlink, FragmentMissing),
        ("f3", MODEL3.format(0), Path.unlink, FragmentMissing),
    ],
)
def test_damage_to_one_file_is_found_and_named(
    copied: Callable[[str], Path],
    checkpoint: str,
    file: str,
    damage: Callable[[Path], None],
    error: type[Exception],
) -> None:
    root = copied(checkpoint)
    damage(root / "global_step4" / file)
    with pytest.raises(error, match="global_step4"):
        open_checkpoint(str(root))


def swap(root: Path, one: str, other: str) -> None:
    (root / one).rename(root / "aside")
    (root / other).rename(root / one)
    (root / "aside").rename(root / other)


@pytest.mark.parametrize(
    ("directory", "one", "other"),
    [
        ("z1/global_step4", OPTIM.format(0), OPTIM.format(1)),
        ("z3/global_step4", OPTIM.format(0), OPTIM.format(1)),
        ("f3/global_step4", MODEL3.format(0), MODEL3.format(1)),
        ("z1/global_step4", MODEL, OPTIM.format(1)),
        ("z1/global_step4_u", "zero/emb.weight/exp_avg.pt", "zero/emb.weight/exp_avg_sq.pt"),
    ],
)
def test_files_that_changed_places_are_found(
    copied: Callable[[str], Path], directory: str, one: str, other: str
) -> None:
    root = copied(directory)
    swap(root, one, other)
    with pytest.raises(ChecksumMismatch, match="was written as"):
        open_checkpoint(str(root))


@pytest.mark.parametrize(
    ("gone", "error"),
    [
        ("zero/emb.weight/fp32.pt", FragmentMissing),
        ("zero/emb.weight/exp_avg.pt", FragmentMissing),
        ("zero/emb.weight/step.pt", FragmentMissing),
        (MODEL, FragmentMissing),
    ],
)
def test_a_universal_directory_with_a_file_missing_is_refused(
    copied: Callable[[str], Path], gone: str, error: type[Exception]
) -> None:
    root = copied("z1/global_step4_u")
    (root / gone).unlink()
    with pytest.raises(error):
        open_checkpoint(str(root))


def test_parameters_of_another_model_are_refused_by_name(copied: Callable[[str], Path]) -> None:
    root = copied("z1/global_step4_u")
    (root / "zero" / "emb.weight").rename(root / "zero" / "tok.weight")
    with pytest.raises(FragmentMissing, match=r"emb\.weight"):
        open_checkpoint(str(root))
    root = copied("z3/global_step4_u")
    swap(root / "zero", "emb.weight", "lnf.weight")
    with pytest.raises(CheckpointError, match=r"emb\.weight.*101, 32"):
        open_checkpoint(str(root))


def test_ranks_of_two_checkpoints_are_refused(copied: Callable[[str], Path]) -> None:
    one, other = copied("z1/global_step4"), copied("f1/global_step4")
    (other / OPTIM.format(1)).replace(one / OPTIM.format(1))
    with pytest.raises(CheckpointError):
        open_checkpoint(str(one))
    one, other = copied("z2/global_step4"), copied("z3/global_step4")
    (other / MODEL3.format(0)).replace(one / MODEL3.format(0))
    with pytest.raises(TensorMismatch, match="don't belong"):
        open_checkpoint(str(one))


def test_an_empty_file_of_an_expert_is_damage(copied: Callable[[str], Path]) -> None:
    root = copied("z1/global_step4")
    (root / "layer_0_expert_1_mp_rank_00_model_states.pt").touch()
    with pytest.raises(ChecksumMismatch, match="it is empty"):
        open_checkpoint(str(root))


def test_a_checkpoint_without_zero_says_what_to_do(tmp_path: Path) -> None:
    torch.save({"module": {"w": torch.zeros(2)}, "param_shapes": None, "global_steps": 1}, tmp_path / MODEL)
    with pytest.raises(FormatUnsupported, match="without ZeRO"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("latest", "error"),
    [
        ("global_step4", None),
        ("global_step4\n", None),
        ("global_step9", NoCheckpoint),
        ("../z1/global_step4", ChecksumMismatch),
        ("..", ChecksumMismatch),
        ("", ChecksumMismatch),
    ],
)
def test_latest_leads_to_a_directory_beside_it_or_nowhere(
    copied: Callable[[str], Path], latest: str, error: type[Exception] | None
) -> None:
    root = copied("z1")
    (root / "latest").write_text(latest)
    if error is None:
        assert open_checkpoint(str(root)).document["step"] == 4
    else:
        with pytest.raises(error):
            open_checkpoint(str(root))


def test_a_directory_that_is_no_checkpoint_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for url in (
        str(tmp_path),
        str(tmp_path / "gone"),
        str(tmp_path / "gone.pt"),
        str(tmp_path / "notes.txt"),
    ):
        with pytest.raises(NoCheckpoint):
            open_checkpoint(url)
        with pytest.raises(NoCheckpoint):
            open_checkpoint(url)


def test_a_file_that_shrinks_after_opening_is_an_error_when_it_is_read(copied: Callable[[str], Path]) -> None:
    root = copied("z1/global_step4")
    checkpoint = open_checkpoint(str(root))
    halve(root / OPTIM.format(1))
    with pytest.raises(FragmentMissing, match="too early"):
        checkpoint.read("head.weight", "param")
