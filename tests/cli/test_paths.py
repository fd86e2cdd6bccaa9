"""Paths that lead nowhere, files that are something else, and names that a terminal would act on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from elastic_train.cli.app import app
from elastic_train.cli.exit_codes import CHECKPOINT, FINISHED, USAGE, USER_ERROR
from elastic_train.cli.output import say_json
from elastic_train.observe.text_columns import columns, plain

pytestmark = pytest.mark.ring1
GOLDEN = Path(__file__).parents[1] / "golden" / "v1"
RED = "\x1b[31mred\x07"


def run(*arguments: object, code: int = FINISHED) -> str:
    found = CliRunner().invoke(app, list(map(str, arguments)))
    assert found.exit_code == code, found.output
    assert not isinstance(found.exception, Exception), found.exception
    return found.output


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN, tmp_path / "ours")


@pytest.mark.parametrize(
    "verb",
    [
        "ckpt ls @",
        "ckpt show @",
        "ckpt show @ --step 3",
        "ckpt verify @",
        "ckpt gc @",
        "ckpt gc --dry-run @",
        "ckpt export @ out --to hf",
        "ckpt import @ new",
        "ckpt diff @ @",
        "ckpt plan @ --to dp_shard=2",
        "ckpt save @",
        "status @",
        "events @",
        "logs @",
        "stop @",
    ],
)
def test_a_path_where_nothing_is_is_wrong_usage(tmp_path: Path, verb: str) -> None:
    gone = str(tmp_path / "gone")
    assert gone in run(*(gone if word == "@" else word for word in verb.split()), code=USAGE)
    assert not Path(gone).exists()


@pytest.mark.parametrize("verb", ["ls", "gc", "show", "verify"])
def test_an_empty_directory_is_no_run(tmp_path: Path, verb: str) -> None:
    assert "Nothing at all is there" in run("ckpt", verb, tmp_path, code=CHECKPOINT)


@pytest.mark.parametrize("verb", ["ls", "gc", "show", "verify"])
def test_no_path_is_not_the_present_directory(verb: str) -> None:
    assert "the path is empty" in run("ckpt", verb, "", code=USAGE)


def test_a_large_tree_is_not_walked_for_a_hint() -> None:
    assert "there is no run here" in run("ckpt", "ls", "/", code=CHECKPOINT)


@pytest.mark.parametrize("verb", ["ls", "gc", "show", "verify"])
def test_a_file_is_no_run(tmp_path: Path, verb: str) -> None:
    (tmp_path / "file").write_text("x")
    run("ckpt", verb, tmp_path / "file", code=CHECKPOINT)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("part.distcp", "Name the file that is meant: {}/part.distcp"),
        ("state/part.distcp", "Name the directory that is meant: {}/state"),
        ("notes.txt", "Check the path"),
    ],
)
def test_what_may_be_meant_is_named(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(b"x")
    shown = run("ckpt", "show", tmp_path, code=CHECKPOINT)
    assert "nothing was committed here" in shown
    assert said.format(tmp_path) in shown


@pytest.mark.parametrize(
    ("text", "said"), [(None, "there is no file"), ("{", "is no JSON"), ("[]", "no JSON object")]
)
def test_a_config_that_cannot_be_used_is_told_before_anything_is_written(
    ours: Path, tmp_path: Path, text: str | None, said: str
) -> None:
    config = tmp_path / "config.json"
    if text is not None:
        config.write_text(text)
    shown = run("ckpt", "export", ours, tmp_path / "out", "--to", "hf", "--config", config, code=USAGE)
    assert "--config" in shown
    assert said in shown
    assert not (tmp_path / "out").exists()


def test_every_verb_has_json(ours: Path, tmp_path: Path) -> None:
    assert json.loads(run("ckpt", "verify", ours, "--json"))["sound"] is True
    assert json.loads(run("ckpt", "ls", ours, "--json"))
    assert json.loads(run("ckpt", "gc", ours, "--dry-run", "--json"))["removed"] is False
    out = tmp_path / "out"
    assert json.loads(run("ckpt", "export", ours, out, "--to", "hf", "--json"))["bytes"] > 0
    reported = json.loads(run("ckpt", "import", out, tmp_path / "run", "--json"))
    assert reported["tensors"] > 0
    assert json.loads(run("ckpt", "diff", out, out, "--json")) == {"differences": []}
    assert json.loads(run("ckpt", "diff", ours, out, "--json", code=USER_ERROR))["differences"]


def test_what_a_terminal_would_act_on_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    save_file(
        {RED: np.zeros(2, np.float32), "a\nb": np.ones(2, np.float32)}, tmp_path / "theirs" / "m.safetensors"
    )
    for verb in ("show", "verify"):
        shown = run("ckpt", verb, tmp_path / "theirs")
        assert "\x1b" not in shown
        assert "\x07" not in shown
    assert r"\x1b[31mred\x07" in run("ckpt", "show", tmp_path / "theirs")
    assert r"a\nb" in run("ckpt", "show", tmp_path / "theirs")
    (tmp_path / RED).mkdir()
    assert "\x1b" not in run("ckpt", "show", tmp_path / RED, code=CHECKPOINT)


def test_only_what_cannot_be_printed_is_escaped() -> None:
    assert plain("naïve 模型 a b") == "naïve 模型 a b"
    assert plain("a\tb\u202ec\ud800") == r"a\tb\u202ec\ud800"
    assert columns([("name",), (RED,)]) == "name\n" + r"\x1b[31mred\x07"


def test_json_knows_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    say_json({"loss": float("nan"), "all": [1.0, float("inf")], "step": 3})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "all": [1.0, None], "step": 3}
