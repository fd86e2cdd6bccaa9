"""The group that a member will be in next, connected beside the one that it is in.

It is forgotten from any thread, whatever it is doing: no socket, thread or entry of the store is left of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastic_train.errors import GroupBroken
from elastic_train.train.collectives.process_group import Group
from elastic_train.train.rank_assignment import RankAssignment


def group_of(assignment: RankAssignment, device: str, form_timeout_s: float) -> Group:
    """The group of a rank assignment, not formed yet."""
    return Group(
        generation=assignment.generation,
        rank=assignment.rank,
        world_size=assignment.plan.world_size,
        store_host=assignment.store_host,
        store_port=assignment.store_port,
        address=assignment.address,
        device=device,
        form_timeout_s=form_timeout_s,
        meeting=f"/prepared/{assignment.prepared}" if assignment.prepared else "",
    )


class NextGroup:
    """At most one at a time. Safe from any thread."""

    def __init__(self) -> None:
        self._held: tuple[tuple[int, int], Group] | None = None
        self._lock = threading.Lock()

    def connect(
        self, assignment: RankAssignment, device: str, form_timeout_s: float, reached: Callable[[str], None]
    ) -> None:
        """Meet the others and connect to them. GroupBroken where that fails, or it is forgotten meanwhile."""
        self.forget()
        group = group_of(assignment, device, form_timeout_s)
        with self._lock:
            self._held = assignment.meeting, group
        try:
            group.connect(assignment.plan.mesh, reached)
        except BaseException:
            self.forget(*assignment.meeting)
            raise

    def take(self, assignment: RankAssignment) -> Group:
        """The group that was connected for an assignment, which is the taker's from now on."""
        with self._lock:
            held = self._held
            if held is not None and held[0] == assignment.meeting:
                self._held = None
                return held[1]
        raise GroupBroken(
            generation=assignment.generation, reason="what was made ready for it is there no more"
        )

    def forget(self, generation: int = 0, number: int = 0) -> None:
        """Leave nothing of it behind; by default of whichever there is."""
        with self._lock:
            held = self._held
            if held is None or (number and held[0] != (generation, number)):
                return
            self._held = None
        held[1].break_()
        held[1].destroy()
        held[1].withdraw()
