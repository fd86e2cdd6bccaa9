"""The verbs of `elastic-train`. RUN is `<storage_path>/<name>`, a path or a URL."""

from __future__ import annotations

from typing import Annotated

import typer

from elastic_train.cli import checkpoints, status
from elastic_train.cli.exits import exits
from elastic_train.cli.job import load_job, run_job

app = typer.Typer(no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, help=__doc__)
ckpt = typer.Typer(no_args_is_help=True, help="Look at a run's checkpoints.")
app.add_typer(ckpt, name="ckpt")

Run = Annotated[str, typer.Argument(help="The run's directory: <storage_path>/<name>, a path or a URL.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Step = Annotated[int | None, typer.Option(help="The checkpoint's step; the newest by default.")]


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def run(
    context: typer.Context,
    job: Annotated[str, typer.Argument(help="A job file; its options follow it.")],
) -> None:
    """Run a job file. `elastic-train run JOB --help` lists the job's own options."""
    with exits():
        trainer = load_job(job)
    run_job(trainer, context.args, f"elastic-train run {job}")


@app.command("status")
def status_(run: Run, as_json: Json = False) -> None:
    """Where a run stands, from storage alone."""
    with exits():
        status.show_status(run, as_json=as_json)


@app.command()
def events(run: Run, as_json: Json = False) -> None:
    """What happened to a run, and why, one line each."""
    with exits():
        status.show_events(run, as_json=as_json)


@ckpt.command("ls")
def ls(run: Run, as_json: Json = False) -> None:
    """The committed checkpoints, oldest first."""
    with exits():
        checkpoints.list_checkpoints(run, as_json=as_json)


@ckpt.command()
def show(run: Run, step: Step = None, as_json: Json = False) -> None:
    """What a checkpoint holds."""
    with exits():
        checkpoints.show_checkpoint(run, step, as_json=as_json)


@ckpt.command()
def verify(run: Run, step: Step = None) -> None:
    """Read every byte of a checkpoint and compare it with its checksums. Exits with 6 if it is damaged."""
    with exits() as leave:
        leave(checkpoints.verify_checkpoint(run, step))
