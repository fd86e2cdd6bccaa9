"""Poll the run's storage for stop and save requests, which are files."""

from __future__ import annotations

from collections.abc import Callable

from elastic_train.control.events import Event, FaultInjected, SaveRequested, StopRequested
from elastic_train.storage.run_requests import faults_noted, saves_asked, stop_asked
from elastic_train.storage.store import Store


class RequestWatch:
    """Posts each request of a term once."""

    def __init__(self, store: Store, term: int, post: Callable[[Event], None]) -> None:
        self._store, self._term, self._post = store, term, post
        self._saves_heard = 0
        self._stop_heard = False
        self._faults_heard = 0

    def look(self) -> None:
        reason = stop_asked(self._store, self._term)
        if reason is not None and not self._stop_heard:
            self._stop_heard = True
            self._post(StopRequested(at=0.0, reason=reason, patient=True))
        saves = saves_asked(self._store, self._term)
        if saves > self._saves_heard:
            self._saves_heard = saves
            self._post(SaveRequested(at=0.0, reason="`elastic-train ckpt save`"))
        for noted in faults_noted(self._store, self._term, self._faults_heard):
            self._faults_heard += 1
            if noted is None:
                continue
            nodes, workers = tuple(noted["nodes"]), tuple(noted["workers"])
            self._post(FaultInjected(at=0.0, what=noted["what"], nodes=nodes, workers=workers))
