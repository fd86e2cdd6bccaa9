"""Long work of every verb of `ckpt` says how far it is, and every verb has `--json`."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import typer
from safetensors.numpy import save_file
from typer.testing import CliRunner

from elastic_train.cli import progress as shown
from elastic_train.cli.app import app, ckpt

pytestmark = pytest.mark.ring1


def test_every_verb_has_json() -> None:
    for command in ckpt.registered_commands:
        made = typer.main.get_command_from_info(command, pretty_exceptions_short=False, rich_markup_mode=None)
        assert any("--json" in parameter.opts for parameter in made.params), made.name


def test_work_that_ends_soon_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with shown.progress("read", lambda: 1, 2):
        pass
    assert capsys.readouterr() == ("", "")


def test_long_work_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shown, "LOG_S", 0.001)
    asked = threading.Event()

    def done() -> int:
        asked.set()
        return 3 << 30

    with shown.progress("read\x1b", done, 4 << 30):
        assert asked.wait(60)
    out, said = capsys.readouterr()
    assert out == ""
    first = said.splitlines()[0]
    assert first.startswith("read\\x1b 3.0 GiB of 4.0 GiB, ")
    assert first.endswith(" s left")


@pytest.mark.parametrize("verb", ["import", "verify", "export", "diff"])
def test_verbs_that_read_say_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_file({"w": np.full(1000, ord(name), np.float32)}, tmp_path / name / "model.safetensors")
    counted: list[int] = []

    def watched(*words: object, **named: object) -> object:
        made = real(*words, **named)  # type: ignore[arg-type]
        counted.append(1)
        return made

    real = shown.progress
    monkeypatch.setattr(shown, "progress", watched)
    words = {
        "import": ["import", "a", "run", "--copy"],
        "verify": ["verify", "a"],
        "export": ["export", "a", "out", "--to", "dcp"],
        "diff": ["diff", "a", "b"],
    }[verb]
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["ckpt", *words, "--json"])
    assert found.exit_code == (1 if verb == "diff" else 0), found.output
    assert isinstance(json.loads(found.stdout), dict)
    assert counted == [1]
