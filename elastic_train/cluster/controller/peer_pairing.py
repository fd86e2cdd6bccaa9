"""Pairs peer stores in the background, once for however many changes of the group ask for it meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

from elastic_train.cluster.controller.effects import Done, Effect, Effects, Ending, Lane
from elastic_train.cluster.controller.peer_stores import PeerStores

log = logging.getLogger(__name__)


class PeerPairing:
    """`standby` tells the nodes whose workers all stand by: they are free to hold copies of others."""

    def __init__(
        self,
        peer_stores: PeerStores,
        effects: Effects,
        *,
        standby: Callable[[], Collection[str]],
        within_s: float,
    ) -> None:
        self._peer_stores, self._effects = peer_stores, effects
        self._standby, self._within_s = standby, within_s
        self._lock = threading.Lock()
        self._waiting = False  # for its turn

    def begin(self) -> None:
        with self._lock:
            if self._waiting:  # and looks at what is there by then
                return
            self._waiting = True

        def ended(ending: Ending[None]) -> None:
            self._waiting = False
            if not isinstance(ending, Done):
                log.warning("the peer stores were not paired: %s", ending)

        name = "pairing the peer stores"
        self._effects.begin(
            Effect(name=name, lane=Lane.FORMING, within_s=self._within_s, call=self._pair, ended=ended)
        )

    def _pair(self) -> None:
        with self._lock:
            self._waiting = False
        self._peer_stores.pair(self._standby())
