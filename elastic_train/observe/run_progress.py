"""Progress of a run (step, loss, speed, phase), folded from its journal one record at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic_train.control.events import CheckpointCommitted, GroupReady, StepCommitted, TermBegan
from elastic_train.observe.journal_records import Record

SPEED_STEPS = 8
"""Steps that the speed is averaged over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    step: int = 0
    loss: float | None = None
    skipped: bool = False
    skips: int = 0  # executions of steps that were skipped, because they weren't finite
    speeds: tuple[tuple[float, float], ...] = ()  # (tokens, seconds) of the last steps of this generation
    generation: int = 0
    dp: int = 0
    nodes: int = 0
    saved: int | None = None
    groups: int = 0  # ever formed
    phase: str = "waiting"
    reason: str = ""
    ended: tuple[str, str] | None = None

    @property
    def tokens_per_s(self) -> float | None:
        seconds = sum(s for _, s in self.speeds)
        return sum(t for t, _ in self.speeds) / seconds if seconds else None

    @property
    def restarts(self) -> int:
        """Reconfigurations after the first group."""
        return max(self.groups - 1, 0)


def advance(progress: RunProgress, record: Record) -> RunProgress:
    """The progress after one more record."""
    progress = replace(progress, phase=record.phase, reason=record.reason, ended=record.ended)
    if record.formed is not None:
        progress = replace(
            progress,
            generation=record.formed.generation,
            dp=record.formed.dp,
            nodes=len(set(record.formed.nodes)),
            groups=progress.groups + 1,
            speeds=(),
        )
    match record.event:
        case TermBegan(stored=stored) if stored is not None and progress.saved is None:
            return replace(progress, saved=stored.step, step=max(progress.step, stored.step))
        case GroupReady(generation=generation, step=step) if generation == progress.generation:
            return replace(progress, step=step)
        case StepCommitted() as event if (
            event.generation == progress.generation and event.step > progress.step
        ):
            return replace(
                progress,
                step=event.step,
                loss=event.loss,
                skipped=event.skipped,
                skips=progress.skips + event.skipped,
                speeds=(*progress.speeds[1 - SPEED_STEPS :], (event.tokens, event.seconds)),
            )
        case CheckpointCommitted(stored=stored):
            return replace(progress, saved=max(stored.step, progress.saved or 0))
        case _:
            return progress
