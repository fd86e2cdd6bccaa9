"""The laws of the house that no other tool checks."""

from __future__ import annotations

import ast
import pickle
import re
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
    own |= set((ROOT / "elastic_train" / "integrations").glob("*/__init__.py"))  # what their users import
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


THREADS = {"Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "submit", "start_new_thread"}
OWN_THREADS = {
    # The controller's process: one thread decides, everything else is an effect.
    "controller": {"Thread"},
    "effects": {"Thread"},
    # Processes that the controller started, each with a life of its own.
    "event_hooks": {"Thread"},
    "direct_tier": {"ThreadPoolExecutor", "submit"},
    "shared_memory_tier": {"ThreadPoolExecutor", "submit"},
    "spot_notices": {"Thread"},
    "outbox": {"Thread"},
    "training_thread": {"Thread"},
    "worker": {"submit"},
    "prepare_rank": {"submit"},
    "capture_output": {"Thread"},
    # The driver's process: the page that it was asked to serve, and the faults that are given to it.
    "live_page": {"Thread"},
    "cluster_faults": {"Timer"},
}
"""Who in `cluster/` starts something of its own, and how. Whatever else takes time is an effect."""


def calls(file: Path) -> list[tuple[str, str, ast.Call]]:
    """Every call of a file: the name that is called, what it is an attribute of, the call."""
    found: list[tuple[str, str, ast.Call]] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.append((node.func.id, "", node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found.append((node.func.attr, ast.unparse(node.func.value), node))
    return found


def test_only_effects_do_something_outside_the_deciding_thread() -> None:
    for file in sorted((ROOT / "elastic_train" / "cluster").rglob("*.py")):
        started = {name for name, _, _ in calls(file) if name in THREADS}
        allowed = OWN_THREADS.get(file.stem, set())
        assert started == allowed, f"{file.name} starts {started ^ allowed}: make it an effect"


def test_nobody_waits_for_an_actor_without_a_deadline() -> None:
    endless = [
        f"{file.name}:{call.lineno}"
        for file in sorted((ROOT / "elastic_train" / "cluster").rglob("*.py"))
        for name, of, call in calls(file)
        if (name, of) in (("get", "ray"), ("wait", "ray"))
        and not any(word.arg == "timeout" for word in call.keywords)
    ]
    assert not endless


def test_each_test_says_its_ring() -> None:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    assert [file.name for file in files if not re.search(r"\bmark\.ring\d", file.read_text())] == []
