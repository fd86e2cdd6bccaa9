"""The verbs of `elastic-train`. RUN is `<storage_path>/<name>`, a path or a URL."""

from __future__ import annotations

from typing import Annotated

import typer

from elastic_train.cli import checkpoints, convert, status
from elastic_train.cli.exits import exits
from elastic_train.cli.job import load_job, run_job

app = typer.Typer(no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, help=__doc__)
ckpt = typer.Typer(no_args_is_help=True, help="Look at, convert and clean up checkpoints.")
app.add_typer(ckpt, name="ckpt")

Run = Annotated[str, typer.Argument(help="The run's directory: <storage_path>/<name>, a path or a URL.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Spec = Annotated[str | None, typer.Option(help="A specification of names and layouts, a TOML file.")]
ShowMap = Annotated[bool, typer.Option("--describe", help="Print the map of every tensor and stop.")]
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


@ckpt.command("export")
def export(
    run: Run,
    out: Annotated[str, typer.Argument(help="An empty directory, a path or a URL.")],
    to: Annotated[str, typer.Option(help="hf, ucp or dcp.")],
    spec: Spec = None,
    step: Step = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32 or fp64, for floating tensors.")] = None,
    config: Annotated[str | None, typer.Option(help="A file that becomes config.json.")] = None,
    show_map: ShowMap = False,
) -> None:
    """Write a checkpoint in another system's form, block by block."""
    with exits():
        convert.export_checkpoint(
            run, out, to=to, spec=spec, step=step, dtype=dtype, config=config, show=show_map
        )


@ckpt.command("import")
def import_(
    source: Annotated[str, typer.Argument(help="A checkpoint of another system, a path or a URL.")],
    run: Run,
    spec: Spec = None,
    copy: Annotated[bool, typer.Option(help="Copy the bytes instead of pointing at them.")] = False,
    show_map: ShowMap = False,
) -> None:
    """Make another system's checkpoint the first one of a run."""
    with exits():
        convert.import_checkpoint(source, run, spec=spec, copy=copy, show=show_map)


@ckpt.command()
def diff(
    a: Annotated[str, typer.Argument(help="A run, a checkpoint's directory, or another system's.")],
    b: Annotated[str, typer.Argument(help="Another one.")],
    spec: Annotated[str | None, typer.Option(help="A specification that reads B in A's terms.")] = None,
) -> None:
    """What differs between two checkpoints, bit by bit. Exits with 1 if something does."""
    with exits() as leave:
        leave(convert.diff_checkpoints(a, b, spec=spec))


@ckpt.command("plan")
def plan_reads(
    run: Run,
    to: Annotated[str, typer.Option(help="Axes of a plan, like dp_shard=4.")],
    step: Step = None,
    as_json: Json = False,
) -> None:
    """What the ranks of a plan would read, and the memory that it takes."""
    with exits():
        convert.show_read_plan(run, step, to=to, as_json=as_json)


@ckpt.command()
def gc(
    run: Run,
    dry_run: Annotated[bool, typer.Option(help="Only say what would be removed.")] = False,
) -> None:
    """Remove what no committed checkpoint needs."""
    with exits():
        convert.collect_garbage(run, dry_run=dry_run)
