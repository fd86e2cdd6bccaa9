"""The page of a run that its own driver serves while it lasts, from what the controller says.

So it also tells of trouble while storage is away, which a page that reads storage cannot. A thread serves it;
what it shows is copied when somebody looks.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime

from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.cluster.run_reading import covered, records
from elastic_train.cluster.run_updates import RunUpdate
from elastic_train.config import RunSpec
from elastic_train.errors import StorageError
from elastic_train.observe.run_summary import RunSummary
from elastic_train.show.address import PageAddress, guarded, listen, not_installed, said_address
from elastic_train.show.model import Shown
from elastic_train.storage.fsspec_store import child_url, open_store
from elastic_train.storage.store import Store

FIELD = "fit(page=...)"
EVERY_S = 1.0
"""Between two looks of somebody who has the page open."""
LAST_LOOK_S = 3.0
"""How long the end of a run waits until whoever looks has seen it."""
CLOSING_S = 5.0


class LivePage:
    """`hear` belongs to the driver's loop, `look` to the page's threads."""

    def __init__(self, spec: RunSpec) -> None:
        self._name = spec.name
        self._url = child_url(spec.storage_path, spec.name)
        self._store = open_store(self._url)
        self._lock = threading.Lock()
        self._term = 0
        self._told = RunSummary()
        self._config: Mapping[str, object] = {"max_steps": spec.max_steps}

    def hear(self, update: RunUpdate) -> None:
        """Take in what happened. With a new term what storage has of the time before it is read once."""
        if not update.records:
            return
        with self._lock:
            if update.term != self._term:
                self._term = update.term
                self._told, self._config = _history(self._store, update.records[0].wall, self._config)
            for record in update.records:
                self._told.add(record)

    def look(self) -> Shown:
        with self._lock:
            told = copy.deepcopy(self._told)
        return Shown(
            name=self._name,
            url=self._url,
            told=told,
            config=self._config,
            now=datetime.now(UTC).timestamp(),
        )


def _history(
    store: Store, until: str, config: Mapping[str, object]
) -> tuple[RunSummary, Mapping[str, object]]:
    """What storage has of a run before a moment, and its configuration; nothing while storage is away."""
    try:
        told, after = covered(store)
        for record in records(store, after):
            if record.wall < until:
                told.add(record)
        return told, RunDirectory(store).config() or config
    except StorageError:
        return RunSummary(), config


@contextmanager
def live_page(
    spec: RunSpec, said: str | int | None, token: str | None = None
) -> Iterator[tuple[LivePage, PageAddress] | None]:
    """Serve a run's page within the block, and nothing of it after that; None where it isn't asked for.

    Raises ConfigError where the address can't be had or the extra is missing. A block that ends as it should
    waits until those who look have seen the end.
    """
    if said is None:
        yield None
        return
    try:
        import uvicorn  # noqa: PLC0415 - of the extra `ui`

        from elastic_train.show.server import application  # noqa: PLC0415
    except ImportError as error:
        raise not_installed(error, FIELD) from error
    host, port = said_address(said, FIELD)
    listening = listen(host, port, FIELD)  # before anything else of the run is started
    address = guarded(host, listening.getsockname()[1], token)
    page = LivePage(spec)
    app = application([page], token=address.token, every_s=EVERY_S)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), name="page", daemon=True)
    thread.start()
    try:
        yield page, address
        until = time.monotonic() + LAST_LOOK_S
        while server.server_state.tasks and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        server.should_exit = True
        thread.join(CLOSING_S)
        listening.close()
