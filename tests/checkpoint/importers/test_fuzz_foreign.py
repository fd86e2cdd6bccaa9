"""Whatever is changed in another system's checkpoint, opening it gives sound tensors or a typed error."""

from __future__ import annotations

import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from elastic_train.testing import damage_pickle
from elastic_train.testing.damage_zip import Entry, entries_of, zip_bytes
from elastic_train.testing.fuzz_foreign import Distributed, Foreign, Given, Safetensors, TorchFileFormat
from elastic_train.testing.fuzzing import fuzz
from tests.checkpoint.importers.test_megatron import by_ranges, bytes_of, model, settings, values, write

WRITTEN: tuple[type[Foreign], ...] = (TorchFileFormat, Distributed, Safetensors)
GIVEN = (
    "z1/global_step4", "z3/global_step4", "z1/global_step4_u", "megatron/iter_0000080",
    "training_directories/trainer", "training_directories/acc_bin", "training_directories/lightning.ckpt",
    "moe1/global_step4", "auto3/global_step4",
)  # fmt: skip
FORMATS = (*(kind.__name__ for kind in WRITTEN), *GIVEN)
EACH, PARTS = 85, 13
Place = Callable[[str], str]


@pytest.fixture(scope="module")
def place(deepspeed: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Where the fuzzer finds a format: a class that writes it, or what its own system wrote."""
    others = tmp_path_factory.mktemp("others")
    for name in ("training_directories_tiny", "deepspeed_moe_tiny"):
        with tarfile.open(Path(__file__).parents[2] / "fixtures" / f"{name}.tar.gz") as archive:
            archive.extractall(others, filter="data")
    tensors = values()
    states, shapes = by_ranges(tensors)
    common = {"common_state/shard_0_1": bytes_of(settings(80))}
    write(others / "megatron", 80, model(tensors) | states | common, shapes=shapes)

    def of(name: str) -> str:
        for kind in WRITTEN:
            if kind.__name__ == name:
                return f"{kind.__module__}:{name}"
        source = next(p for p in (others / name, deepspeed / name) if p.exists())
        return f"{Given.__module__}:{Given.__name__}:{source}"

    return of


def check(root: Path, place: str, seeds: range) -> None:
    cases = fuzz(place, seeds, root)
    assert [case for case in cases if not case.passed] == []
    assert "typed" in {case.verdict for case in cases}


@pytest.mark.ring1
@pytest.mark.parametrize("name", FORMATS)
def test_changes_of_other_systems_files_are_noticed_or_harmless(
    tmp_path: Path, place: Place, name: str
) -> None:
    check(tmp_path, place(name), range(EACH))


@pytest.mark.ring1
@pytest.mark.matrix
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("part", range(1, PARTS))
def test_many_changes_of_other_systems_files_are_noticed_or_harmless(
    tmp_path: Path, place: Place, name: str, part: int
) -> None:
    check(tmp_path, place(name), range(EACH * part, EACH * (part + 1)))


# -- what the fuzzer makes is what it says --


@pytest.mark.ring0
def test_a_zip_is_what_its_entries_say() -> None:
    entries = [Entry(name=b"x/a", data=b"one"), Entry(name=b"x/b", data=b"", wide=True)]
    later = [Entry(name=b"x/a", data=b"one", later=True)]
    assert [(e.name, e.data) for e in entries_of(zip_bytes(entries))] == [(b"x/a", b"one"), (b"x/b", b"")]
    assert entries_of(zip_bytes(later, comment=b"!"))[0].data == b"one"


@pytest.mark.ring0
def test_a_pickle_keeps_its_instructions_but_for_one_place() -> None:
    data = pickle.dumps({"a": [1, 2**40], "b": ("x", 3.5)}, protocol=4)
    parts = damage_pickle.instructions(data)
    assert pickle.loads(b"".join(p.data for p in parts)) == {"a": [1, 2**40], "b": ("x", 3.5)}
    for seed in range(300):
        made, what = damage_pickle.other_pickle(data, Random(seed))
        assert isinstance(made, bytes)
        assert what
    for value in (0, -1, 255, -(2**63), 10**5000):
        assert pickle.loads(damage_pickle.integer(value) + b".") == value
