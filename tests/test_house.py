"""The laws of the house that no other tool checks."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from elastic_train import errors

pytestmark = pytest.mark.ring0
ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "elastic_train").rglob("*.py"))
ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.ElasticTrainError)
]


def test_importing_the_package_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys, elastic_train as et; et.Batch; "
        "sys.exit(', '.join({'ray', 'torch'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", [["--help"], ["status", "--help"], ["ckpt", "ls", "--help"]])
def test_the_command_line_answers_without_ray_or_torch(verb: list[str]) -> None:
    code = (
        "import sys, atexit; sys.argv = ['elastic-train', *sys.argv[1:]]\n"
        "atexit.register(lambda: print('LOADED', sorted({'ray', 'torch'} & set(sys.modules))))\n"
        "from elastic_train.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *verb], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "LOADED []" in done.stdout


@pytest.mark.parametrize(
    ("process", "unneeded"),
    [
        ("controller.controller", {"torch", "pandas"}),
        ("peer_store.peer_store", {"torch", "pandas"}),
        ("worker.worker", {"pandas"}),
    ],
)
def test_a_process_of_a_run_loads_only_what_it_needs(process: str, unneeded: set[str]) -> None:
    code = (
        f"import sys, elastic_train.cluster.{process}; "
        f"sys.exit(', '.join({unneeded} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_file_is_longer_than_400_lines() -> None:
    long = {f.relative_to(ROOT): n for f in FILES if (n := len(f.read_text().splitlines())) > 400}
    assert not long


def test_a_room_says_its_law_and_nothing_else_in_its_init() -> None:
    own = {ROOT / "elastic_train" / "__init__.py", ROOT / "elastic_train" / "cli" / "__init__.py"}
    for file in FILES:
        if file.name == "__init__.py" and file not in own:
            body = ast.parse(file.read_text()).body
            assert len(body) == 1, file
            assert isinstance(body[0], ast.Expr), file


def test_no_room_is_a_drawer() -> None:
    drawers = {"utils", "helpers", "common", "manager", "base", "misc"}
    assert not [f for f in FILES if f.stem in drawers or f.parent.name in drawers]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_crosses_a_process_border_intact(kind: type[errors.ElasticTrainError]) -> None:
    values = {f.name: 3 if f.type in ("int", "float") else "x" for f in fields(kind)}
    error = pickle.loads(pickle.dumps(kind(**values)))
    assert type(error) is kind
    assert {name: getattr(error, name) for name in values} == values
    assert str(error) or not values


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_is_in_the_hierarchy_of_the_docstring(kind: type[errors.ElasticTrainError]) -> None:
    assert kind.__name__ in (errors.__doc__ or "")
