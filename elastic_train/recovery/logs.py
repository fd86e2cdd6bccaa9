"""What the logs of a stage's neighbours allow to be replayed."""

from __future__ import annotations

from collections.abc import Iterable

from elastic_train.recovery.evidence import Logged

Span = tuple[int, int]
"""First and last step that a sender's log holds whole."""


def replayable(generation: int, stage: int, spans: Iterable[Span | None]) -> Logged | None:
    """The steps that every sender into the stage has; None where one has none or they don't meet."""
    found = list(spans)
    whole = [span for span in found if span is not None]
    if not found or len(whole) < len(found):
        return None
    first, last = max(span[0] for span in whole), min(span[1] for span in whole)
    return Logged(generation=generation, stage=stage, first=first, last=last) if first <= last else None
