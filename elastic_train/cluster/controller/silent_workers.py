"""Check workers whose heartbeats stopped, by other means, before they count as lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from elastic_train.cluster.controller.effects import Done, Effect, Effects, Ending, Lane
from elastic_train.cluster.controller.liveness_watch import WorkerWatch
from elastic_train.cluster.controller.node_roster import Roster
from elastic_train.cluster.process_witness import ANSWER_S, sightings

log = logging.getLogger(__name__)
SLACK_S = 5.0


class SilentWorkers:
    """`peer stores` are those that may be asked, by node."""

    def __init__(
        self,
        watch: WorkerWatch,
        *,
        effects: Effects,
        roster: Roster,
        peer_stores: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._watch, self._effects, self._roster, self._peer_stores = watch, effects, roster, peer_stores
        self._looking = False

    def check(self) -> None:
        """Once a tick: have those looked at whose silence has become long. Ends in WorkerLost, or in
        nothing.
        """
        suspects = self._watch.suspects() if not self._looking else {}
        if not suspects:
            return
        self._looking = True

        def ended(ending: Ending[frozenset[str]]) -> None:
            if not isinstance(ending, Done):
                log.warning("nobody looked at %s: %s", ", ".join(suspects), ending)
            self._looking = False
            self._watch.judge(suspects, ending.value if isinstance(ending, Done) else frozenset())

        self._effects.begin(
            Effect(
                name=f"looking at {', '.join(suspects)}",
                lane=Lane.URGENT,
                within_s=ANSWER_S + SLACK_S,
                call=lambda: self._living(suspects),
                ended=ended,
            )
        )

    def _living(self, suspects: Mapping[str, tuple[str, int]]) -> frozenset[str]:
        """Those of the suspects that live, or of which nothing can be known from here for now."""
        nodes = {node for node, _ in suspects.values()}
        accept = self._roster.accept_now({*self._watch.nodes_heard(), *nodes})
        if not accept:
            return frozenset(self._watch.within_patience(suspects))
        there = {worker: place for worker, place in suspects.items() if place[0] in accept}
        seen = sightings(there, self._peer_stores(), self._roster.living())
        return frozenset(worker for worker, sighting in seen.items() if sighting.alive)
