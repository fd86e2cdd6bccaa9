"""Run a job file: `trainer(**options) -> ElasticTrainer` becomes a command whose options are flags."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from elastic_train.cli.exit_codes import OUTCOMES, STOPPED, exits
from elastic_train.cli.output import say
from elastic_train.config import Prints
from elastic_train.errors import ConfigError, ElasticTrainError, UserCodeError

if TYPE_CHECKING:
    from elastic_train.api import ElasticTrainer

Address = Annotated[
    str | None, typer.Option(help="Ray cluster to use; default: RAY_ADDRESS, else a local cluster.")
]
LocalNodes = Annotated[int, typer.Option(min=1, help="Nodes of the local cluster, one CPU each.")]


Shown = Annotated[
    Prints,
    typer.Option(
        help="Whose prints to show: of no rank, the first, or all. `elastic-train logs` always has them.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say the whole reason of each event.")]
Page = Annotated[
    str | None,
    typer.Option(help="Serve the run's page while it lasts: a port of this machine, or HOST:PORT."),
]
PLACES: Mapping[str, tuple[object, object]] = {
    "address": (None, Address),
    "local_nodes": (3, LocalNodes),
    "prints": ("none", Shown),
    "verbose": (False, Verbose),
    "page": (None, Page),
}
"""Options of `fit`, by name: default and kind. An option of the job's own of such a name goes to the job."""


def main(trainer: Callable[..., ElasticTrainer]) -> None:
    """Run a job file from the command line: the options of `trainer` become flags."""
    run_job(trainer, sys.argv[1:])


def run_job(trainer: Callable[..., ElasticTrainer], arguments: Sequence[str], name: str = "") -> None:
    """Parse the arguments against the options of `trainer` and run what it returns."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=inspect.getdoc(trainer))(_command(trainer))
    app(list(arguments), prog_name=name or Path(sys.argv[0]).name)


def load_job(path: str) -> Callable[..., ElasticTrainer]:
    """The `trainer` function of a job file. The module travels to workers by value, not by import."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(field="JOB", problem=f"there is no file {path}.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.parent))
    with jobs_own_errors("loading the job"), _as_script(path):
        spec.loader.exec_module(module)
    if not hasattr(module, "trainer"):
        raise ConfigError(
            field="JOB", problem=f"{path} defines no function `trainer(**options) -> ElasticTrainer`."
        )
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(module)
    made: Callable[..., ElasticTrainer] = module.trainer

    @functools.wraps(made)
    def trainer(**options: Any) -> ElasticTrainer:
        with _as_script(path):
            return made(**options)

    return trainer


@contextmanager
def _as_script(path: str) -> Iterator[None]:
    """The job file is the script that runs, as in `python JOB`: a run without a name is named after it."""
    before, sys.argv = sys.argv, [path, *sys.argv[1:]]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def jobs_own_errors(phase: str) -> Iterator[None]:
    """Whatever the job's file raises is its own, with its own traceback."""
    try:
        yield
    except ElasticTrainError:
        raise
    except Exception as error:  # noqa: BLE001
        frame, ours = error.__traceback__, (__file__, "<frozen importlib")
        while frame is not None and frame.tb_frame.f_code.co_filename.startswith(ours):
            frame = frame.tb_next
        raise UserCodeError(
            worker="the driver",
            rank=-1,
            node="",
            step=0,
            phase=phase,
            error=f"{type(error).__name__}: {error}".splitlines()[0],
            traceback="".join(traceback.format_exception(type(error), error, frame)),
        ) from None


@contextmanager
def _interrupted_too_early(leave: Callable[[int], None]) -> Iterator[None]:
    """A run that goes on heeds interrupts itself; before it there is nothing to stop, after it no more."""
    try:
        yield
    except KeyboardInterrupt:
        say("stopped on request: SIGINT, before the run began", error=True)
        leave(STOPPED)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # how the run ended is the exit code


def _command(trainer: Callable[..., ElasticTrainer]) -> Callable[..., None]:
    """`trainer`'s signature with the options of a place added; typer reads flags and types from it."""

    hints = get_type_hints(trainer, include_extras=True)
    own = {
        name: p.replace(annotation=hints[name]) for name, p in inspect.signature(trainer).parameters.items()
    }

    @functools.wraps(trainer)
    def command(**options: Any) -> None:
        places = {name: options.pop(name) for name in PLACES if name not in own}
        with exits(driver=True) as leave, _interrupted_too_early(leave):
            with jobs_own_errors("making the trainer of its options"):
                made = trainer(**options)
            result = made.fit(**places)
            leave(OUTCOMES[result.outcome])

    places = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (default, kind) in PLACES.items()
        if name not in own
    ]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.values()] + places
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command
