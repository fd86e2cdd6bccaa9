"""Estimate what a snapshot to peer memory costs, from the times of the steps beside it.

A snapshot costs more than its copy: digests, the transfer to another node and its arrival there take
processor time and memory bandwidth while training goes on. What that is, only the steps can tell: those
during which a snapshot was under way, beside those during which none was.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

QUIET_STEPS = 8
"""Steps without a snapshot that the others are compared with."""

ENOUGH = 3
"""Steps without a snapshot, and snapshots, from which a cost is believed."""

SNAPSHOTS = 9
"""Snapshots whose cost is remembered."""

RENEW_STEPS = 200
"""Steps after which the comparison is out of date: the machine or the batch may be another by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCost:
    """A fold over the steps of one generation.

    `quiet` are seconds of the last steps without a snapshot, `beside` the number and seconds of those during
    which the present one is under way, `taken` what each of the last snapshots took in all, in seconds.
    """

    quiet: tuple[float, ...] = ()
    beside: tuple[int, float] = (0, 0.0)
    taken: tuple[float, ...] = ()
    since_quiet: int = 0

    def after(self, seconds: float, *, under_way: bool) -> SnapshotCost:
        """After a step of so many seconds, during which a snapshot was under way or not."""
        if under_way:
            steps, so_far = self.beside
            return replace(self, beside=(steps + 1, so_far + seconds), since_quiet=self.since_quiet + 1)
        quiet = (*self.quiet, seconds)[-QUIET_STEPS:]
        return replace(self._ended(), quiet=quiet, since_quiet=0)

    def begun(self) -> SnapshotCost:
        """Another snapshot begins: the steps from here are beside that one."""
        return self._ended()

    def seconds(self, copy_s: float) -> float:
        """What the next snapshot is expected to take: never less than its copy did."""
        return copy_s if len(self.taken) < ENOUGH else max(copy_s, statistics.median(self.taken))

    @property
    def wants_quiet(self) -> bool:
        """Whether the next snapshot had better wait for steps without any."""
        if len(self.taken) < ENOUGH:
            return self.since_quiet > 0 or 0 < len(self.quiet) < ENOUGH
        return self.since_quiet >= RENEW_STEPS

    def _ended(self) -> SnapshotCost:
        """With what the steps beside the last snapshot took beyond others, if there were others."""
        steps, seconds = self.beside
        over = replace(self, beside=(0, 0.0))
        if not steps or len(self.quiet) < ENOUGH:
            return over
        beyond = seconds - steps * statistics.median(self.quiet)
        return replace(over, taken=(*self.taken, beyond)[-SNAPSHOTS:])
