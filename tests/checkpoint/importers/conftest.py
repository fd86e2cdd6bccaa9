"""Checkpoints that DeepSpeed wrote, unpacked once, and copies that a test may damage."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture(scope="session")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with z1, z2, z3, f1, f3, p1, p3, b1, b3 and q3. Nothing in it is changed."""
    target = tmp_path_factory.mktemp("deepspeed")
    for name in ("deepspeed_zero_tiny.tar.gz", "deepspeed_bf16_tiny.tar.gz"):
        with tarfile.open(FIXTURES / name) as archive:
            archive.extractall(target, filter="data")
    return target


@pytest.fixture
def copied(deepspeed: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one checkpoint's directory (`z1`, or `z1/global_step4_u`)."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(deepspeed / name, tmp_path / "copy" / name))

    return copy
