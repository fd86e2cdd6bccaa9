"""Runs that somebody drives, as they show in storage."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elastic_train.cli import logs_stop_save
from elastic_train.storage.lease import Lease


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage is looked at often."""
    monkeypatch.setattr(logs_stop_save, "POLL_S", 0.02)


@contextmanager
def renewing(lease: Lease, term: int = 1) -> Iterator[None]:
    """Somebody renews a lease, again and again, so that whoever watches sees it whenever he begins."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(0.05):
            lease.renew(term)

    renewer = threading.Thread(target=renew)
    renewer.start()
    try:
        yield
    finally:
        over.set()
        renewer.join()
