"""What the documentation names exists: pages, places in them, verbs, options; and its Python compiles."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import typer

import elastic_train
from elastic_train.cli.app import app
from elastic_train.cli.job_file import PLACES

pytestmark = pytest.mark.ring0
ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND: Any = typer.main.get_command(app)  # of click, or of typer's own copy of it


def blocks(page: Path, language: str) -> list[str]:
    return [body for name, body in FENCED.findall(page.read_text()) if name == language]


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text())


def places(page: Path) -> set[str]:
    """The anchors of a page: those of its headings, as GitHub makes them, and those that it sets itself."""
    text = prose(page)
    found: set[str] = set(re.findall(r'<a id="(.+?)"></a>', text))
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(next(s for n in range(99) if (s := f"{slug}-{n}" if n else slug) not in found))
    return found


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    wrong: list[str] = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose(page))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, place = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        known = there.exists() and (not place or (there.suffix == ".md" and place in places(there)))
        wrong += [] if known else [target]
    assert not wrong


ROOMS = {
    file.stem
    for file in (ROOT / "elastic_train").iterdir()
    if not file.name.startswith("_") and (file.suffix == ".py" or file.is_dir())
}
FOLDERS = ROOMS | {"tests", "benchmarks", "docs", "jobs", "deploy"}


def is_there(path: str) -> bool:
    """In the repository or in the package, also without its `.py`."""
    return any(
        (root / f"{path}{end}").exists() for root in (ROOT, ROOT / "elastic_train") for end in ("", ".py")
    )


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_and_names_of_the_package_that_are_named_are_there(page: Path) -> None:
    said = prose(page)
    paths = [path for path in re.findall(r"`([\w./-]+/[\w./-]*)`", said) if path.split("/")[0] in FOLDERS]
    assert [path for path in paths if not is_there(path)] == []
    names = [
        name for name in re.findall(r"`([a-z_]+(?:\.\w+)+)(?:\([^`]*)?`", said) if name.split(".")[0] in ROOMS
    ]
    names = [name for name in names if not name.endswith((".py", ".json", ".parquet", ".md", ".svg"))]
    assert [name for name in names if pydoc.locate(f"elastic_train.{name}") is None] == []


def said_by(page: Path) -> list[tuple[str, bool]]:
    """Each command line, and whether it stands whole in a block."""
    lines = [line for kind in ("console", "") for body in blocks(page, kind) for line in body.splitlines()]
    whole = [line.removeprefix("$ ") for line in lines if line.startswith(("$ ", "elastic-train "))]
    named = re.findall(r"`([^`\n]+)`", prose(page))
    found = [(line, True) for line in whole] + [(line, False) for line in named]
    return [(line, block) for line, block in found if line.startswith(("elastic-train ", "python jobs/"))]


def jobs_options(file: str) -> set[str]:
    """The flags of a job file, read off its `trainer` without running it."""
    functions = [
        node for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    (trainer,) = (function for function in functions if function.name == "trainer")
    names = [argument.arg for argument in trainer.args.kwonlyargs] + list(PLACES)
    return {f"--{name.replace('_', '-')}" for name in names}


def check_job(words: list[str]) -> None:
    file, *rest = words
    if (ROOT / file).is_file():  # others are a reader's own
        unknown = {word.partition("=")[0] for word in rest if word.startswith("--")} - jobs_options(file)
        assert not unknown, f"{file} has no option {', '.join(sorted(unknown))}"


def verb(words: list[str]) -> tuple[Any, list[str]]:
    """The verb of a command line, and what follows it."""
    command, words = COMMAND, words[1:]
    while hasattr(command, "commands") and words and words[0] != "--help":
        assert words[0] in command.commands, f"there is no verb {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


def check(line: str, *, whole: bool) -> None:
    words = shlex.split(line, comments=True)
    if words[0] == "python":
        check_job(words[1:])
        return
    command, words = verb(words)
    try:
        context = command.make_context("elastic-train", list(words), resilient_parsing="--help" in words)
    except typer.BadParameter as error:
        if whole or not error.format_message().startswith("Missing argument"):
            raise
        return
    if command.name == "run":
        check_job([context.params["job"], *context.args])
    elif command.name == "plan" and "job" in context.params and (job := context.params["job"]):
        check_job([job, *context.args])


def each(line: str) -> list[str]:
    """`ckpt ls | show` names several verbs at once."""
    head, *others = re.split(r" \| (?=[a-z])", line)
    return [head, *(f"{head.rpartition(' ')[0]} {other}" for other in others)]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_command_lines_are_ones_that_exist(page: Path) -> None:
    for line, whole in said_by(page):
        lines = each(line)
        for one in lines:
            try:
                check(one, whole=whole and len(lines) == 1)
            except Exception as error:  # noqa: BLE001
                pytest.fail(f"{one}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_compiles(page: Path) -> None:
    new = [
        "\n".join(line[1:] for line in diff.splitlines() if line[:1] in ("+", " "))
        for diff in blocks(page, "diff")
    ]
    for block in (*blocks(page, "python"), *new):
        compile(textwrap.dedent(block), str(page), "exec")


def leaves(command: Any) -> list[Any]:
    if not hasattr(command, "commands"):
        return [command]
    return [leaf for one in command.commands.values() for leaf in leaves(one)]


@pytest.mark.parametrize(
    "line",
    [
        "elastic-train statuss RUN",
        "elastic-train status RUN --jsn",
        "elastic-train status",
        "elastic-train ckpt export RUN OUT --to",
        "elastic-train ckpt verify RUN --step newest",
        "elastic-train run jobs/pretrain_lm.py --max-stepps 3",
        "elastic-train plan jobs/pretrain_lm.py --nodes 2x4 --bogus 3",
        "python jobs/pretrain_lm.py --bogus 3",
    ],
)
def test_a_line_that_does_not_exist_is_found(line: str) -> None:
    with pytest.raises(Exception, match=r"."):
        check(line, whole=True)


def test_every_page_is_in_the_index_and_every_verb_in_some_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()
    lines = [one for page in PAGES for line, _ in said_by(page) for one in each(line)]
    named = [verb(shlex.split(one, comments=True))[0] for one in lines if one.startswith("elastic-train")]
    assert {command.name for command in leaves(COMMAND) if command not in named} == set()


def test_the_reference_has_every_exported_name_and_each_says_what_it_is() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text()
    paths = set(re.findall(r"auto\w+:: (elastic_train[\w.]*)", reference))
    assert {f"elastic_train.{name}" for name in elastic_train.__all__} <= paths
    for path in paths:
        thing = pydoc.locate(path)
        written = inspect.getdoc(thing)
        assert written, path
        assert not written.startswith(f"{path.rpartition('.')[2]}("), (
            f"{path} has a signature for a docstring"
        )


def test_the_example_of_sizing_prints_what_the_page_says() -> None:
    page = ROOT / "docs" / "sizing.md"
    (code,), (printed,) = blocks(page, "python"), blocks(page, "")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == printed, done.stderr


@pytest.mark.matrix
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the extra `docs` brings it")
    line = ["-q", "-W", "--keep-going", "-b", "html", "-c", "docs/site", "-d", str(tmp_path / "trees")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *line, ".", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "elastic_train.ElasticTrainer" in (tmp_path / "site" / "docs" / "reference.html").read_text()
