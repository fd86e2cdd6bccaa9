"""What is installed: every file, all that is imported, and little that is loaded before the first word."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "elastic_train"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_EXTRAS = {
    "show/exposition.py": {"ui"},
    "show/server.py": {"ui"},
    "cli/report_and_ui.py": {"ui"},
    "cluster/driver/live_page.py": {"ui"},
    "integrations/hf/": {"hf"},
    "integrations/lightning/": {"lightning"},
    "models/hf_tokens.py": {"hf"},
    "models/parameter_names.py": {"hf"},
    "testing/store_contract.py": {"dev"},
}
"""Which modules, or all of a folder, may import what an extra brings."""


@pytest.mark.ring2
def test_a_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="the extra `dev` brings it")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    subprocess.run(
        [*pip, "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)], check=True, timeout=200
    )
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("elastic_train/")}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".pyc", ".pyo")}
    assert packed == {str(path.relative_to(ROOT)) for path in files}
    assert {"elastic_train/py.typed", "elastic_train/show/page.css", "elastic_train/show/page.js"} <= packed


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def _imports(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names) - {"elastic_train"}


@pytest.mark.ring0
def test_everything_that_is_imported_is_declared() -> None:
    homes = packages_distributions()
    always = {_name(each) for each in PROJECT["dependencies"]}
    missing: list[str] = []
    for file in sorted(PACKAGE.rglob("*.py")):
        where = file.relative_to(PACKAGE).as_posix()
        brought = {extra for begin, names in OF_EXTRAS.items() if where.startswith(begin) for extra in names}
        extras = [PROJECT["optional-dependencies"][extra] for extra in brought]
        declared = always | {_name(each) for extra in extras for each in extra}
        for name in _imports(file):
            if not declared & {_name(each) for each in homes.get(name, [name])}:
                missing.append(f"{where}: {name}")
    assert not missing


@pytest.mark.ring0
@pytest.mark.parametrize(
    ("code", "unneeded"),
    [
        ("import elastic_train", {"dataclasses", "typer", "json", "numpy"}),
        ("from elastic_train.cli import app", {"numpy", "pyarrow", "fsspec", "ssl", "asyncio", "rich"}),
    ],
)
def test_little_is_loaded_before_the_first_word(code: str, unneeded: set[str]) -> None:
    code = f"import sys; {code}; sys.exit(', '.join({unneeded} & set(sys.modules)) or None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
