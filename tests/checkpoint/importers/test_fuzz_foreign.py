"""Whatever is changed in another system's checkpoint, opening it gives sound tensors or a typed error."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.testing.fuzz_foreign import Distributed, Safetensors, TorchFile
from elastic_train.testing.fuzzing import Format, fuzz

FORMATS: tuple[type[Format], ...] = (TorchFile, Distributed, Safetensors)


def check(root: Path, kind: type[Format], seeds: range) -> None:
    cases = fuzz(f"{kind.__module__}:{kind.__qualname__}", seeds, root)
    assert [case for case in cases if not case.passed] == []
    assert {case.verdict for case in cases} == {"same", "typed", "sound"}


@pytest.mark.ring1
@pytest.mark.parametrize("kind", FORMATS)
def test_changes_of_other_systems_files_are_noticed_or_harmless(tmp_path: Path, kind: type[Format]) -> None:
    check(tmp_path, kind, range(250))


@pytest.mark.ring1
@pytest.mark.matrix
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("part", range(1, 21))
def test_many_changes_of_other_systems_files_are_noticed_or_harmless(
    tmp_path: Path, kind: type[Format], part: int
) -> None:
    check(tmp_path, kind, range(250 * part, 250 * (part + 1)))
