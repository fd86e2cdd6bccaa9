"""Whatever is changed in a checkpoint, opening it gives sound tensors or a typed error, within bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.testing.fuzz_native import Native
from elastic_train.testing.fuzzing import Case, fuzz

NATIVE = f"{Native.__module__}:{Native.__qualname__}"
EACH = 250


def run(root: Path, part: int) -> list[Case]:
    return fuzz(NATIVE, range(part * EACH, (part + 1) * EACH), root)


def check(cases: list[Case]) -> None:
    assert [case for case in cases if not case.passed] == []
    verdicts = {case.verdict for case in cases}
    assert verdicts == {"same", "typed", "sound"}


@pytest.mark.ring1
@pytest.mark.parametrize("part", range(8))
def test_two_thousand_changes_are_noticed_or_harmless(tmp_path: Path, part: int) -> None:
    check(run(tmp_path, part))


@pytest.mark.ring1
@pytest.mark.matrix
@pytest.mark.parametrize("part", range(8, 88))
def test_twenty_thousand_changes_are_noticed_or_harmless(tmp_path: Path, part: int) -> None:
    check(run(tmp_path, part))
