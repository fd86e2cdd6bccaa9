"""Names and paths that nobody means: each is passed over, or is a typed error that says what is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.writer import write_part
from elastic_train.cli.import_checkpoint import import_checkpoint
from elastic_train.errors import ConfigError, NoCheckpoint, StorageError
from elastic_train.storage.fsspec_store import open_store

pytestmark = pytest.mark.ring1

Cut = Callable[..., Piece]


@pytest.fixture
def root(tmp_path: Path, cut: Cut) -> Path:
    """A run with one checkpoint."""
    run = RunDirectory(open_store(str(tmp_path / "run")))
    term = run.begin_term("a")
    directory = attempt_path(step=1, generation=1)
    parts = [write_part(run.store, directory, 0, [cut("w", np.arange(8, dtype=np.float32))])]
    stored = assemble(run.store, directory, parts, {"step": 1})
    run.commit(stored, term=term, generation=1, step=1, lineage=[(1, 0)])
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["00000000", "abc", "1", "-0000001", "٠٠٠٠٠٠٠٣"])
def test_what_is_no_slot_of_the_log_is_passed_over(root: Path, name: str) -> None:
    (root / "commits" / f"{name}.json").write_bytes(b"junk")
    assert open_checkpoint(str(root)).read("w", "param").sum() == 28


def test_the_slot_that_is_missing_is_the_one_that_is_named(root: Path) -> None:
    for name in ("00000000.json", "99999999.json"):
        (root / "commits" / name).write_bytes(b"junk")
    with pytest.raises(NoCheckpoint, match=r"slots up to 99999999 .* slot 3 is missing"):
        open_checkpoint(str(root))


def test_a_record_whose_path_is_no_text_is_damaged(root: Path) -> None:
    slot = root / "commits" / "00000002.json"
    slot.write_text(json.dumps(json.loads(slot.read_text()) | {"path": "checkpoints/\ud800"}))
    with pytest.raises(NoCheckpoint, match=r"slot 2 .* can't be read \(UnicodeEncodeError"):
        open_checkpoint(str(root))


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("", ConfigError),
        ("/tmp/a\0b", ConfigError),
        ("/tmp/" + "a" * 5000, StorageError),
        ("/tmp/\ud800", ConfigError),
    ],
)
def test_what_no_path_can_be_is_refused(url: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        open_checkpoint(url)


def test_a_directory_whose_name_is_no_text_is_read_and_imported_as_a_copy(tmp_path: Path) -> None:
    source = tmp_path / os.fsdecode(b"\xff\xfe")
    source.mkdir()
    save_file({"w": np.ones(3, np.float32)}, source / "model.safetensors")
    assert open_checkpoint(str(source)).read("w", "param").sum() == 3
    run = str(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"isn't UTF-8.*--copy"):
        import_checkpoint(str(source), run, spec=None, copy=False, show=False)
    import_checkpoint(str(source), run, spec=None, copy=True, show=False)
    assert open_checkpoint(run).read("w", "param").sum() == 3


def test_an_import_that_fails_leaves_the_run_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    run = str(tmp_path / "run")
    create = RunDirectory.commit

    def failing(*args: object, **kwargs: object) -> None:
        raise StorageError(path=run, operation="write", problem="it is full.")

    monkeypatch.setattr(RunDirectory, "commit", failing)
    with pytest.raises(StorageError):
        import_checkpoint(str(tmp_path / "model.safetensors"), run, spec=None, copy=False, show=False)
    monkeypatch.setattr(RunDirectory, "commit", create)
    import_checkpoint(str(tmp_path / "model.safetensors"), run, spec=None, copy=False, show=False)
    assert open_checkpoint(run).read("w", "param").sum() == 3
