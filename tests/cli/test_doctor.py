"""`doctor` tries a storage path out and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastic_train.cli.app import app
from elastic_train.cli.exit_codes import FINISHED, USAGE

pytestmark = pytest.mark.ring1


def test_a_good_place_is_praised_and_left_as_it_was(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["doctor", str(tmp_path / "runs"), "--state", "0.001"])
    assert found.exit_code == FINISHED, found.output
    assert "can hold runs" in found.output
    assert "one writer" in found.output
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize(
    ("place", "options", "said"),
    [("file/runs", (), "cannot create"), ("runs", ("--state", "1e9"), "bytes are needed")],
)
def test_a_bad_place_is_refused_with_the_reason(
    tmp_path: Path, place: str, options: tuple[str, ...], said: str
) -> None:
    (tmp_path / "file").write_text("no directory")
    found = CliRunner().invoke(app, ["doctor", str(tmp_path / place), *options])
    assert found.exit_code == USAGE
    assert said in found.output
