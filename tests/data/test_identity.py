"""The identity of a data set: the same after a restart, another when the data is."""

from __future__ import annotations

import copy
import datetime
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch

from elastic_train.data.identity import digest_of, fingerprint, identify
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


SPARSE = torch.tensor([[0.0, 2.0], [3.0, 0.0]])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (SPARSE.to_sparse(), (SPARSE * 2).to_sparse()),
        (SPARSE.to_sparse(), SPARSE.T.to_sparse()),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)),
        (datetime.date(2026, 1, 2), datetime.date(2026, 1, 3)),
        (datetime.datetime(2026, 1, 2), datetime.datetime(2026, 1, 2, 1)),
        (Decimal("1.5"), Decimal("1.50")),
        (Path("a"), Path("b")),
        ({"a", "b"}, {"a", "c"}),
        (range(3), range(4)),
        (None, ()),
        ([], {}),
    ],
    ids=repr,
)
def test_samples_of_any_kind_are_told_apart(one: object, other: object) -> None:
    assert digest_of(one) == digest_of(copy.deepcopy(one))
    assert digest_of(one) != digest_of(other)
    assert digest_of({"x": [one]}) != digest_of({"x": [other]})


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:.*nested tensors:UserWarning")
def test_tensors_of_every_layout_have_a_fingerprint() -> None:
    layouts = [SPARSE.to_sparse(), SPARSE.to_sparse_csr(), SPARSE.to_sparse_csc(), SPARSE]
    layouts.append(torch.nested.nested_tensor([SPARSE, SPARSE[:1]]))
    assert len({digest_of(tensor) for tensor in layouts}) == len(layouts)
