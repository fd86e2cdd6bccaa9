"""The verbs of `elastic-train`. RUN is `<storage_path>/<name>`, a path or a URL."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from elastic_train.cli.chaos import chaos
from elastic_train.cli.exit_codes import CAPACITY, USAGE, exits
from elastic_train.cli.job_file import load_job, run_job

CODES = (
    "Exit codes: 0 finished, 1 the job's own code failed, 2 wrong usage or configuration, 3 infrastructure "
    "failed beyond its budget, 4 waited too long for capacity, 5 stopped on request, 6 damaged or missing "
    "checkpoint."
)
HELP = "--help"
JOBS_OWN = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""For verbs whose further options are those of a job: `--help` may be one of them."""

app = typer.Typer(
    no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, help=__doc__, epilog=CODES
)
ckpt = typer.Typer(no_args_is_help=True, help="Look at, convert and clean up checkpoints.")
app.add_typer(ckpt, name="ckpt")
app.command()(chaos)


@ckpt.callback()
def _in_ckpt() -> None:
    from elastic_train.cli.index_directory import choose_index_directory

    choose_index_directory()


def _path(value: str) -> str:
    """A path or URL; an empty one would be the present directory."""
    if not value.strip():
        raise typer.BadParameter("the path is empty; '.' is the directory that you are in")
    return value


def _positive(value: float | None) -> float | None:
    if value is not None and not 0 < value < float("inf"):
        raise typer.BadParameter(f"must be a positive number, got {value}")
    return value


def _place(name: str, said: str) -> Any:
    return typer.Argument(metavar=name, help=said, callback=_path)


def _above_zero(said: str) -> Any:
    return typer.Option(help=said, callback=_positive)


Run = Annotated[str, _place("RUN", "The run's directory: <storage_path>/<name>, a path or a URL.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Spec = Annotated[str | None, typer.Option(help="A specification of names and layouts, a TOML file.")]
ShowMap = Annotated[bool, typer.Option("--describe", help="Print the map of every tensor and stop.")]
Allow = Annotated[
    list[str] | None,
    typer.Option("--allow-root", help="A directory outside of the checkpoint whose files it may name."),
]
Ledger = Annotated[Path | None, typer.Option(help="A file to note what was right in, and to go on from.")]
Step = Annotated[int | None, typer.Option(help="The checkpoint's step; the newest by default.")]


@app.command(context_settings=JOBS_OWN, epilog=CODES)
def run(
    context: typer.Context,
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="A Python file with `trainer(**options) -> ElasticTrainer`.")
    ],
) -> None:
    """Run a job file, or go on with its run. The options of its `trainer` are flags that follow it.

    `elastic-train run JOB --help` lists them, beside --address of a Ray cluster (default: RAY_ADDRESS, else a
    local cluster) and --local-nodes of a local one.
    """
    _explain(context, job)
    with exits():
        trainer = load_job(job)
    run_job(trainer, context.args, f"elastic-train run {job}")


def _explain(context: typer.Context, job: str) -> None:
    """Where help is asked for in the place of a job, say what the verb does."""
    if job == HELP:
        print(context.get_help())
        raise typer.Exit
    if job.startswith("-"):
        raise typer.BadParameter(f"the job file comes first, and its options, such as {job}, after it")


@app.command(context_settings=JOBS_OWN, epilog=CODES)
def plan(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job file; its own options may follow.")],
    nodes: Annotated[str, typer.Option(help="Nodes and workers on each, like 2x4,1x2. Required.")] = "",
    before: Annotated[str, typer.Option(help="The nodes that the run is on now: what has to move.")] = "",
    hardware: Annotated[str, typer.Option(help="A known accelerator, like h100; its rates.")] = "",
    memory: Annotated[float | None, _above_zero("GiB of memory of a worker.")] = None,
    tflops: Annotated[float | None, _above_zero("Tera-operations per second of a worker; 0.05.")] = None,
    inside: Annotated[float | None, _above_zero("GB/s between workers of a node; 5.")] = None,
    between: Annotated[float | None, _above_zero("GB/s of a node to the others; 1.")] = None,
    latency: Annotated[float | None, _above_zero("Microseconds of a message; 100.")] = None,
    run: Annotated[str, typer.Option(help="A run's URL: what its steps took stands beside.")] = "",
    as_json: Json = False,
) -> None:
    """The candidates for a job on given nodes, and why one is chosen. Exits with 4 where none is possible.

    Nothing is started. `elastic-train plan JOB --help` lists the job's own options, too.
    """
    _explain(context, job)
    if HELP in context.args:
        print(context.get_help() + "\n")
    elif not nodes:
        raise typer.BadParameter("say which nodes there are, like --nodes 2x4,1x2")
    from elastic_train.cli.show_plan import Machines, show_plan

    with exits() as leave:
        feasible = show_plan(
            job,
            context.args,
            nodes=nodes,
            before=before,
            machines=Machines.of(
                hardware, memory=memory, tflops=tflops, inside=inside, between=between, latency=latency
            ),
            measured=run,
            as_json=as_json,
        )
        if not feasible:
            leave(CAPACITY)


@app.command("status")
def status_(run: Run, as_json: Json = False) -> None:
    """Where a run stands, from storage alone."""
    from elastic_train.cli import status

    with exits():
        status.show_status(run, as_json=as_json)


@app.command()
def events(run: Run, as_json: Json = False) -> None:
    """What happened to a run, and why, one line each."""
    from elastic_train.cli import status

    with exits():
        status.show_events(run, as_json=as_json)


@app.command()
def report(
    run: Run,
    out: Annotated[str, typer.Option(help="A file, or - for the output. NAME.html by default.")] = "",
    svg: Annotated[bool, typer.Option("--svg", help="Only the picture of the timeline, as SVG.")] = False,
    png: Annotated[bool, typer.Option("--png", help="The same as PNG, drawn by a local Chromium.")] = False,
) -> None:
    """A run's whole history as one HTML file that needs nothing else, from storage alone."""
    from elastic_train.cli.report_and_ui import write_report

    if svg and png:
        raise typer.BadParameter("a picture is either --svg or --png")
    with exits():
        write_report(run, out, form="svg" if svg else "png" if png else "html")


@app.command()
def ui(
    runs: Annotated[
        list[str], typer.Argument(help="Runs, or a directory of this machine with runs.", metavar="RUN")
    ],
    host: Annotated[str, typer.Option(help="Where to listen; other machines need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on.")] = 8420,
    token: Annotated[
        str | None,
        typer.Option(envvar="ELASTIC_TRAIN_UI_TOKEN", help="Who has it may look; made up beyond loopback."),
    ] = None,
) -> None:
    """A live page of one run or several side by side, and their metrics at /metrics, from storage alone."""
    from elastic_train.cli.report_and_ui import serve

    with exits():
        serve(runs, host=host, port=port, token=token)


@app.command()
def logs(
    run: Run,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the run ends.")] = False,
    output: Annotated[bool, typer.Option(help="Also what the job's own code printed on its workers.")] = True,
    rank: Annotated[int | None, typer.Option(help="Only what this rank printed.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="The whole reason of each event.")] = False,
) -> None:
    """What a run did, what its job printed, and where it stands. With -f the exit code is the run's end."""
    from elastic_train.cli import logs_stop_save

    with exits() as leave:
        leave(logs_stop_save.show_logs(run, follow=follow, output=output, rank=rank, verbose=verbose))


@app.command()
def stop(run: Run, wait: Annotated[bool, typer.Option(help="Return when it stopped.")] = False) -> None:
    """Stop a run at its next step, with a checkpoint. Its storage is enough to ask."""
    from elastic_train.cli import logs_stop_save

    with exits() as leave:
        leave(logs_stop_save.stop_run(run, wait=wait))


@app.command()
def doctor(
    storage: Annotated[str, _place("STORAGE", "A storage path, as in RunConfig: a path or a URL.")],
    state: Annotated[
        float, typer.Option(min=0.0, help="GiB of parameters and optimizer state, for the space.")
    ] = 0.0,
    address: Annotated[
        str | None, typer.Option(envvar="RAY_ADDRESS", help="A Ray cluster, to try from each of its nodes.")
    ] = None,
) -> None:
    """Try out a storage path from here and from every node. Exits with 2, and the reason, if it is unfit."""
    from elastic_train.cli.doctor import examine

    with exits() as leave:
        if not examine(storage, state_bytes=int(state * 2**30), address=address):
            leave(USAGE)


@ckpt.command("ls")
def ls(run: Run, as_json: Json = False) -> None:
    """The committed checkpoints, oldest first."""
    from elastic_train.cli import show_checkpoints

    with exits():
        show_checkpoints.list_checkpoints(run, as_json=as_json)


@ckpt.command()
def save(
    run: Run,
    wait: Annotated[float, typer.Option(min=0.0, help="Seconds until it has to be committed.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Take a checkpoint of a run that trains, at its next step. Its storage is enough to ask."""
    from elastic_train.cli import logs_stop_save

    with exits() as leave:
        leave(logs_stop_save.save_run(run, within_s=wait, as_json=as_json))


@ckpt.command()
def show(run: Run, step: Step = None, as_json: Json = False) -> None:
    """What a checkpoint holds."""
    from elastic_train.cli import show_checkpoints

    with exits():
        show_checkpoints.show_checkpoint(run, step, as_json=as_json)


@ckpt.command()
def verify(
    run: Run, step: Step = None, ledger: Ledger = None, as_json: Json = False, allow_root: Allow = None
) -> None:
    """Read every byte of a checkpoint and compare it with its checksums. Exits with 6 if it is damaged."""
    from elastic_train.cli import show_checkpoints

    with exits() as leave:
        leave(show_checkpoints.verify_checkpoint(run, step, ledger, as_json=as_json, allow_roots=allow_root))


@ckpt.command("export")
def export(
    run: Run,
    out: Annotated[str, _place("OUT", "An empty directory, a path or a URL.")],
    to: Annotated[str, typer.Option(help="hf, ucp or dcp.")],
    spec: Spec = None,
    step: Step = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32 or fp64, for floating tensors.")] = None,
    config: Annotated[str | None, typer.Option(help="A file that becomes config.json.")] = None,
    show_map: ShowMap = False,
    as_json: Json = False,
    allow_root: Allow = None,
) -> None:
    """Write a checkpoint in another system's form, block by block."""
    from elastic_train.cli.export_checkpoint import export_checkpoint

    with exits():
        export_checkpoint(
            run,
            out,
            to=to,
            spec=spec,
            step=step,
            dtype=dtype,
            config=config,
            show=show_map,
            allow_roots=allow_root or (),
            as_json=as_json,
        )


@ckpt.command("import")
def import_(
    source: Annotated[str, _place("SOURCE", "A checkpoint of another system, a path or a URL.")],
    run: Run,
    spec: Spec = None,
    copy: Annotated[bool, typer.Option(help="Copy the bytes instead of pointing at them.")] = False,
    names: Annotated[
        str | None,
        typer.Option(help="A file with the names of the optimizer's parameters in its order, one a line."),
    ] = None,
    show_map: ShowMap = False,
    as_json: Json = False,
    allow_root: Allow = None,
) -> None:
    """Make another system's checkpoint the first one of a run.

    Without --copy its files stay where they are. If they are another run's, that run keeps them until
    `ckpt gc --unpin`.
    """
    from elastic_train.cli.import_checkpoint import import_checkpoint

    with exits():
        import_checkpoint(
            source,
            run,
            spec=spec,
            copy=copy,
            show=show_map,
            names=names,
            as_json=as_json,
            allow_roots=allow_root or (),
        )


@ckpt.command()
def diff(
    a: Annotated[str, _place("A", "A run, a checkpoint's directory, or another system's.")],
    b: Annotated[str, _place("B", "Another one.")],
    spec: Annotated[str | None, typer.Option(help="A specification that reads B in A's terms.")] = None,
    as_json: Json = False,
    allow_root: Allow = None,
) -> None:
    """What differs between two checkpoints, bit by bit. Exits with 1 if something does.

    Fragments whose stored hashes are equal aren't read: `ckpt verify` does.
    """
    from elastic_train.cli.compare_checkpoints import diff_checkpoints

    with exits() as leave:
        leave(diff_checkpoints(a, b, spec=spec, as_json=as_json, allow_roots=allow_root or ()))


@ckpt.command("plan", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def plan_reads(
    context: typer.Context,
    run: Run,
    to: Annotated[str, typer.Option(help="Axes of a plan, like dp_shard=4 or, with a job, pp=2,tp=2.")],
    job: Annotated[
        str | None, typer.Option(help="The job file whose model it is; its own options may follow.")
    ] = None,
    step: Step = None,
    as_json: Json = False,
) -> None:
    """What the ranks of a plan would read, and the memory that it takes."""
    from elastic_train.cli.show_read_plan import show_read_plan

    with exits():
        if context.args and job is None:
            raise typer.BadParameter(f"there is no option {context.args[0]}")
        show_read_plan(run, step, to=to, job=job, arguments=context.args, as_json=as_json)


@ckpt.command()
def gc(
    run: Run,
    dry_run: Annotated[bool, typer.Option(help="Only say what would be removed.")] = False,
    wait: Annotated[
        bool, typer.Option(help="Take over a run whose controller shows no life for a lease time.")
    ] = False,
    unpin: Annotated[
        str | None, typer.Option(help="A run that no longer reads files of this one, as `gc` names it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Remove what no committed checkpoint needs. A run that somebody holds is left alone.

    What other runs read here, because it was imported in place, stays until they are named with --unpin.
    """
    from elastic_train.cli.collect_garbage import collect_garbage

    with exits():
        collect_garbage(run, dry_run=dry_run, wait=wait, unpin=unpin, as_json=as_json)
