"""`report` and `ui`: show a run as an HTML file or a local page, read from its storage alone."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from elastic_train.checkpoint.run_directory import CONFIG, RunDirectory
from elastic_train.cli.output import say
from elastic_train.cluster.run_reading import Following
from elastic_train.errors import ConfigError, StorageNotFound
from elastic_train.show.model import Shown
from elastic_train.show.page import page
from elastic_train.show.picture import picture
from elastic_train.storage.fsspec_store import is_local, open_store

LOOPBACK = ("127.0.0.1", "localhost", "::1")


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
            told=self._following.told,
            config=self._config,
            now=datetime.now(UTC).timestamp(),
        )


def write_report(run: str, out: str, *, svg: bool) -> None:
    """Write the report, or only the picture of its timeline, and say where it is."""
    shown = Reading(run).look()
    made = picture(shown) if svg else page(shown)
    if out == "-":
        sys.stdout.write(made)
        return
    path = Path(out or f"{shown.name}.{'svg' if svg else 'html'}")
    try:
        path.write_text(made, encoding="utf-8")
    except OSError as error:
        raise ConfigError(field="--out", problem=f"{path} can't be written: {error.strerror}.") from error
    say(f"wrote {path} ({len(made.encode()) / 1e3:,.0f} kB)")


def serve(runs: Sequence[str], *, host: str, port: int, token: str | None) -> None:
    """Serve the pages until interrupted. Who is not on this machine needs a token."""
    try:
        import uvicorn

        from elastic_train.show.server import application
    except ImportError as error:
        raise ConfigError(
            field="ui",
            problem=f"{error.name} is not installed.",
            remedy="Install the extra: pip install 'elastic_train[ui]'.",
        ) from error
    if host not in LOOPBACK and not token:
        token = secrets.token_urlsafe(24)
    sources = [Reading(run) for given in runs for run in _runs_of(given)]
    for source in sources:
        source.look()
    app = application(sources, token=token)
    said = f"http://{'[' + host + ']' if ':' in host else host}:{port}/"
    say(f"{len(sources)} run{'s' * (len(sources) > 1)} at {said}{'?token=' + token if token else ''}")
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=1)


def _runs_of(path: str) -> list[str]:
    """The run itself, or the runs in a directory of this machine."""
    if open_store(path).exists(CONFIG) or not is_local(path):
        return [path]
    there = Path(path)
    found = sorted(str(d) for d in there.iterdir() if (d / CONFIG).exists()) if there.is_dir() else []
    return found or [path]
