"""Cost of a recovery in seconds: bytes over links, recomputation, steps that are run again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Measured or assumed figures of a run. Parts of the state are fetched and replayed side by side."""

    part_bytes: int = 1 << 30  # parameters and optimizer state of one rank
    peer_bytes_s: float = 1e9
    storage_bytes_s: float = 2e8
    step_s: float = 1.0  # of the whole group
    stage_s: float = 1.0  # of one stage alone, forward and backward of a whole step
    update_s: float = 0.01
    replayers: int = 1  # workers that are there to replay a stage

    def peer_s(self) -> float:
        return self.part_bytes / self.peer_bytes_s

    def storage_s(self) -> float:
        return self.part_bytes / self.storage_bytes_s

    def replay_s(self, steps: int, ranks: int = 1) -> float:
        """Of a stage of so many ranks, by as many times that as there are workers."""
        return steps * (self.stage_s / max(self.replayers // ranks, 1) + self.update_s)

    def again_s(self, steps: int) -> float:
        """Committed steps that the whole group runs again."""
        return steps * self.step_s
