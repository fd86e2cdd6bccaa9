"""Every verb explains itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from elastic_train.cli.app import app
from elastic_train.cli.exit_codes import FINISHED, USAGE, USER_ERROR
from elastic_train.cli.job_file import load_job

pytestmark = pytest.mark.ring2
JOB = """
import elastic_train as et
from tests.tasks.tiny import TinyTask

def trainer(*, width: int = 8) -> et.ElasticTrainer:
    "Draw squares."
    return et.ElasticTrainer(TinyTask(), batch=et.Batch(global_size=4, micro_size=2), max_steps=1)
"""


def verbs(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    command = command or typer.main.get_command(app)
    for name, inner in getattr(command, "commands", {}).items():
        yield (*path, name)
        yield from verbs(inner, (*path, name))


def invoke(*arguments: str):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


@pytest.fixture
def job(tmp_path: Path) -> str:
    file = tmp_path / "squares.py"
    file.write_text(JOB)
    return str(file)


@pytest.mark.parametrize("verb", list(verbs()), ids=" ".join)
def test_every_verb_explains_itself_and_its_options(verb: tuple[str, ...]) -> None:
    shown = invoke(*verb, "--help")
    assert shown.exit_code == FINISHED, shown.output
    assert "Usage:" in shown.output
    command = typer.main.get_command(app)
    for name in verb:
        command = command.commands[name]
    assert command.help
    assert not [p.name for p in command.params if not getattr(p, "help", None)]


def test_run_says_what_a_job_is_and_that_its_options_follow() -> None:
    shown = invoke("run", "--help").output
    assert "trainer(**options) -> ElasticTrainer" in shown
    assert "--address" in shown
    assert "Exit codes" in shown


def test_run_of_a_job_lists_the_jobs_own_options(job: str) -> None:
    shown = invoke("run", job, "--help")
    assert shown.exit_code == FINISHED
    assert "Draw squares." in shown.output
    assert "--width" in shown.output
    assert "--local-nodes" in shown.output


def test_plan_of_a_job_lists_its_own_options_and_the_jobs(job: str) -> None:
    shown = invoke("plan", job, "--help")
    assert shown.exit_code == FINISHED, shown.output
    assert "--nodes" in shown.output
    assert "--width" in shown.output


def test_what_is_missing_is_told_with_an_example(job: str) -> None:
    shown = invoke("plan", job)
    assert shown.exit_code == USAGE
    assert "--nodes 2x4,1x2" in shown.output


@pytest.mark.parametrize("verb", ["run", "plan"])
def test_options_in_front_of_the_job_are_told(job: str, verb: str) -> None:
    shown = invoke(verb, "--width", "3", job)
    assert shown.exit_code == USAGE
    assert "the job file comes first" in shown.output


@pytest.mark.parametrize("number", ["-1", "0", "nan"])
def test_figures_of_a_plan_are_positive(job: str, number: str) -> None:
    shown = invoke("plan", job, "--nodes", "1x2", "--memory", number)
    assert shown.exit_code == USAGE
    assert "must be a positive number" in shown.output


def test_what_a_job_makes_of_its_options_is_its_own_error_in_a_plan(job: str) -> None:
    Path(job).write_text(
        Path(job).read_text().replace("return et", "raise LookupError('mine')\n    return et")
    )
    shown = invoke("plan", job, "--nodes", "1x2")
    assert shown.exit_code == USER_ERROR
    assert "LookupError: mine on the driver while making the trainer" in shown.output


def test_a_run_without_a_name_is_named_after_its_job(job: str) -> None:
    assert load_job(job)().spec.name == "squares"
