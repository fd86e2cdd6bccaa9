"""The lineage of a state: the generations that led to it, oldest first, and the step each started from."""

from __future__ import annotations

from elastic_train.recovery.evidence import Fresh, FromStorage, Live, Mixed, Origin

Lineage = tuple[tuple[int, int], ...]
"""(generation, the step it started from), oldest first. Its steps end where the next one starts."""


def alive(lineage: Lineage, generation: int, step: int) -> bool:
    """Whether state of `generation` at `step` is of the lineage, not newer than where the next began."""
    for place, (number, first) in enumerate(lineage):
        if number == generation:
            last = min((start for _, start in lineage[place + 1 :]), default=step)
            return first <= step <= last
    return False


def extend(lineage: Lineage, origin: Origin, generation: int) -> Lineage:
    """The lineage of a new generation that starts from `origin`. What the origin leaves behind drops out."""
    match origin:
        case Fresh():
            return ((generation, 0),)
        case Live(generation=source, step=step) | Mixed(generation=source, step=step):
            kept = _through(lineage, source)
        case FromStorage(stored=stored):
            step = stored.step
            kept = _through(lineage, stored.generation) or ((stored.generation, 0),)
    return (*kept, (generation, step))


def back_to(lineage: Lineage, generation: int, step: int) -> Lineage:
    """The lineage when `generation` stood at `step`; where that is unknown, one that begins there."""
    kept = _through(lineage, generation)
    return kept if alive(kept, generation, step) else ((generation, 0),)


def began(lineage: Lineage, generation: int, step: int) -> Lineage:
    """The lineage of a new generation of which only is known at which step it began."""
    return (*((number, first) for number, first in lineage if first <= step), (generation, step))


def _through(lineage: Lineage, generation: int) -> Lineage:
    """The lineage up to and with `generation`; empty where it isn't part of it."""
    for place, (number, _) in enumerate(lineage):
        if number == generation:
            return lineage[: place + 1]
    return ()
