"""Whatever is changed in a checkpoint, opening it gives sound tensors or a typed error, within bounds."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from elastic_train.testing.damage import NESTED, json_bytes, other_json
from elastic_train.testing.fuzz_native import Native
from elastic_train.testing.fuzzing import SECRET, fuzz, judge

EACH = 250
NATIVE = f"{Native.__module__}:{Native.__qualname__}"


def run(root: Path, part: int) -> None:
    found = fuzz(NATIVE, range(part * EACH, (part + 1) * EACH), root)
    assert [case for case in found if not case.passed] == []
    assert {case.verdict for case in found} == {"same", "typed", "sound"}


@pytest.mark.ring1
@pytest.mark.parametrize("part", range(4))
def test_a_thousand_changes_of_our_format_are_noticed_or_harmless(tmp_path: Path, part: int) -> None:
    run(tmp_path, part)


@pytest.mark.ring1
@pytest.mark.matrix
@pytest.mark.parametrize("part", range(4, 36))
def test_eight_thousand_changes_more_are_noticed_or_harmless(tmp_path: Path, part: int) -> None:
    run(tmp_path, part)


# -- the fuzzer itself sees what it is there for --


def judged(found: dict[str, Any], *, mended: bool) -> str:
    truth = {"w:param": ("int8", (4,), b"abcd", b"abcd"), "problems": (), "document": b"{}"}
    return judge(truth | found, truth, mended=mended)[0]


@pytest.mark.ring0
def test_a_judge_tells_faults_from_what_is_right() -> None:
    other = ("int8", (4,), b"abcx", b"abcx")
    assert judged({}, mended=False) == "same"
    assert judged({"w:param": other}, mended=True) == "sound"
    assert judged({"w:param": other}, mended=False) == "silent"
    assert judged({"w:param": other, "problems": ("w is damaged",)}, mended=False) == "sound"
    assert judged({"document": b'{"step":1}'}, mended=False) == "silent"
    lost = b'{"foreign":{"not_restored":["x.bin: it is no zip"]}}'
    assert judged({"document": lost}, mended=False) == "sound"
    assert judged({"w:param": ("int8", (4,), b"abcU", b"abc\xaa")}, mended=True) == "undefined"
    assert judged({"w:param": ("int8", (4,), SECRET, SECRET)}, mended=True) == "outside"


@pytest.mark.ring0
def test_json_is_changed_in_one_place_and_nested_as_deep_as_it_says() -> None:
    value = {"a": [1, {"b": "c"}], "d": None}
    for seed in range(200):
        made, what = other_json(value, Random(seed))
        assert what
        json_bytes(made)
    assert value == {"a": [1, {"b": "c"}], "d": None}
    assert json_bytes({"a": f"{NESTED}3"}) == b'{"a": [[[]]]}'
