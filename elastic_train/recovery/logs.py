"""What the logs of a stage's neighbours allow to be replayed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from elastic_train.recovery.evidence import Logged

Span = tuple[int, int]
"""First and last step that a sender's log holds whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a worker's log has of what its stage sent: steps `first` to `last`, whole, with their outcomes.

    `ahead`: the step after `last` is whole too, and its outcome is not known there. `ties` are pairs of
    stages that share a trained parameter, of all stages of the plan. Under the plan of `generation`; steps of
    older generations are among them if the plan is the same.
    """

    generation: int
    stage: int
    first: int
    last: int
    ahead: bool = False
    ties: tuple[tuple[int, int], ...] = ()


def replayable(
    generation: int, stage: int, spans: Iterable[Span | None], senders: tuple[str, ...] = ()
) -> Logged | None:
    """The steps that every sender into the stage has; None where one has none or they don't meet."""
    found = list(spans)
    whole = [span for span in found if span is not None]
    if not found or len(whole) < len(found):
        return None
    first, last = max(span[0] for span in whole), min(span[1] for span in whole)
    if first > last:
        return None
    return Logged(generation=generation, stage=stage, first=first, last=last, senders=senders)


def logged(
    sent: Mapping[str, Iterable[Sent]], stages: Mapping[int, int], voted: Collection[tuple[int, int]]
) -> tuple[Logged, ...]:
    """What can be replayed of every stage, from what the workers that are left told.

    `stages` is the number of stages by generation, `voted` the steps whose outcome somebody knows.
    """
    found: list[Logged] = []
    for generation, count in sorted(stages.items()):
        by_stage = {
            told.stage: (worker, told)
            for worker, all_told in sent.items()
            for told in all_told
            if told.generation == generation
        }
        ties = {pair for _, told in by_stage.values() for pair in told.ties}
        for stage in range(count if by_stage else 0):
            needed = {stage - 1, stage + 1} & set(range(count))
            needed |= {a if b == stage else b for a, b in ties if stage in (a, b)}
            senders = [by_stage[other] for other in sorted(needed) if other in by_stage]
            if len(senders) < len(needed):
                continue
            spans = [(told.first, _last(told, voted)) for _, told in senders]
            log = replayable(generation, stage, spans, tuple(worker for worker, _ in senders))
            found += [log] if log is not None else []
    return tuple(found)


def _last(told: Sent, voted: Collection[tuple[int, int]]) -> int:
    return told.last + (told.ahead and (told.generation, told.last + 1) in voted)
