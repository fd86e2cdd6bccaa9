"""The identity of a data set: the same after a restart, another when the data is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from elastic_train.data.identity import fingerprint, identify
from elastic_train.data.text import TextFiles
from elastic_train.errors import DataMismatch

pytestmark = pytest.mark.ring1

SAMPLES = [{"x": np.full(3, i), "y": ("label", i), "extra": {1.5, i}} for i in range(40)]


def test_a_fingerprint_is_the_same_in_another_process(tmp_path: Path):
    (tmp_path / "a.txt").write_text("some words")
    code = (
        "from elastic_train.data.identity import fingerprint; from elastic_train.data.text import TextFiles;"
        f"print(fingerprint(TextFiles({str(tmp_path)!r}, seq_len=4)), fingerprint([b'a', {{'k': 1.5}}]))"
    )
    reported = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd()
    )
    here = (fingerprint(TextFiles(tmp_path, seq_len=4)), fingerprint([b"a", {"k": 1.5}]))
    assert tuple(reported.stdout.split()) == here


def test_another_length_or_other_contents_are_refused():
    identity = identify(SAMPLES)
    identity.require(identify([*SAMPLES]))
    with pytest.raises(DataMismatch, match="39 samples, the run was started with 40"):
        identity.require(identify(SAMPLES[:39]))
    with pytest.raises(DataMismatch, match="are not those"):
        identity.require(identify([*SAMPLES[:39], {**SAMPLES[39], "x": np.full(3, 7)}]))


def test_a_changed_file_of_equal_window_count_is_another_identity(tmp_path: Path):
    (tmp_path / "a.txt").write_text("some words")
    (tmp_path / "b.txt").write_text("and more words")
    before = identify(TextFiles(tmp_path, seq_len=4))
    (tmp_path / "a.txt").write_text("some word")
    (tmp_path / "b.txt").write_text("and more wordss")
    after = identify(TextFiles(tmp_path, seq_len=4))
    assert before.length == after.length
    assert before != after


def test_moved_files_keep_their_identity(tmp_path: Path):
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.txt").write_text("some words")
    assert identify(TextFiles(tmp_path / "here", seq_len=4)) == identify(
        TextFiles(tmp_path / "there", seq_len=4)
    )


def test_neighbouring_values_do_not_run_into_each_other():
    kinds = [[1, 2, 3], [12, 3], [b"1", b"23"], [b"12", b"3"], ["12", "3"], [[1], [2, 3]], [[1, 2], [3]]]
    assert len({fingerprint(kind) for kind in kinds}) == len(kinds)
