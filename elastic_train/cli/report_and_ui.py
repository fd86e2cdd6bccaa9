"""`report` and `ui`: show a run as an HTML file or a local page, read from its storage alone."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from elastic_train.checkpoint.run_directory import CONFIG, RunDirectory
from elastic_train.cli.output import say
from elastic_train.cli.svg_to_png import png_of
from elastic_train.cluster.run_reading import Following
from elastic_train.errors import ConfigError, StorageNotFound
from elastic_train.show.address import guarded, listen, not_installed
from elastic_train.show.model import Shown
from elastic_train.show.page import page
from elastic_train.show.picture import picture
from elastic_train.storage.fsspec_store import is_local, open_store


class Reading:
    """A run as it is shown, read on with every look. Raises StorageNotFound where there is no journal."""

    def __init__(self, run: str) -> None:
        self._run = run.rstrip("/")
        self._store = open_store(run)
        self._following = Following(self._store)
        self._config = RunDirectory(self._store).config() or {}

    def look(self) -> Shown:
        self._following.look()
        if self._following.told.last is None:
            raise StorageNotFound(
                path=self._run, operation="read", problem="there is no run with a journal here."
            )
        return Shown(
            name=self._run.rsplit("/", 1)[-1],
            url=self._run,
            told=copy.deepcopy(self._following.told),  # the next look, in another thread, goes on with it
            config=self._config,
            now=datetime.now(UTC).timestamp(),
        )


Form = Literal["html", "svg", "png"]


def write_report(run: str, out: str, *, form: Form) -> None:
    """Write the report, or only the picture of its timeline, and say where it is."""
    shown = Reading(run).look()
    made = (page(shown) if form == "html" else picture(shown)).encode()
    if form == "png":
        made = png_of(made.decode(), "--png")
    if out == "-":
        sys.stdout.buffer.write(made)
        return
    path = Path(out or f"{shown.name}.{form}")
    try:
        path.write_bytes(made)
    except OSError as error:
        raise ConfigError(field="--out", problem=f"{path} can't be written: {error.strerror}.") from error
    say(f"wrote {path} ({len(made) / 1e3:,.0f} kB)")


def serve(runs: Sequence[str], *, host: str, port: int, token: str | None) -> None:
    """Serve the pages until interrupted. Who is not on this machine needs a token."""
    try:
        import uvicorn

        from elastic_train.show.server import application
    except ImportError as error:
        raise not_installed(error, "ui") from error
    sources = [Reading(run) for given in runs for run in _runs_of(given)]
    for source in sources:
        source.look()
    listening = listen(host, port, "--port")
    where = guarded(host, listening.getsockname()[1], token)
    app = application(sources, token=where.token)
    say(f"{len(sources)} run{'s' * (len(sources) > 1)} at {where.url}")
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])


def _runs_of(path: str) -> list[str]:
    """The run itself, or the runs in a directory of this machine."""
    if open_store(path).exists(CONFIG) or not is_local(path):
        return [path]
    there = Path(path)
    found = sorted(str(d) for d in there.iterdir() if (d / CONFIG).exists()) if there.is_dir() else []
    return found or [path]
