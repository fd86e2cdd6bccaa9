"""Find the steps of a lost pipeline stage that its neighbours' step logs can replay."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from elastic_train.planner.plan import Plan
from elastic_train.recovery.evidence import Logged

Span = tuple[int, int]
"""First and last step that a sender's log holds whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a worker's log has of what its stage sent: steps `first` to `last`, whole, with their outcomes.

    `ahead`: the step after `last` is whole too, and its outcome is not known there. `ties` are pairs of
    stages that share a trained parameter, of all stages of the plan. Under the plan of `generation`; steps of
    older generations are among them if the plan is the same. `index` is the worker's place in its stage.
    """

    generation: int
    stage: int
    index: int = 0
    first: int
    last: int
    ahead: bool = False
    ties: tuple[tuple[int, int], ...] = ()


def replayable(
    generation: int, stages: tuple[int, int], spans: Iterable[Span | None], senders: tuple[str, ...] = ()
) -> Logged | None:
    """The steps that every sender into the stages has; None where one has none or they don't meet."""
    found = list(spans)
    whole = [span for span in found if span is not None]
    if not found or len(whole) < len(found):
        return None
    first, last = max(span[0] for span in whole), min(span[1] for span in whole)
    if first > last:
        return None
    start, stop = stages
    return Logged(
        generation=generation, stage=start, width=stop - start, first=first, last=last, senders=senders
    )


def logged(
    sent: Mapping[str, Iterable[Sent]], plans: Mapping[int, Plan], voted: Collection[tuple[int, int]]
) -> tuple[Logged, ...]:
    """Steps of every stage, or group of stages, that the final reports of the remaining workers can replay.

    `voted` are the steps whose outcome is known.
    """
    found: list[Logged] = []
    for generation, plan in sorted(plans.items()):
        reported_of = {
            (reported.stage, reported.index): (worker, reported)
            for worker, all_reported in sent.items()
            for reported in all_reported
            if reported.generation == generation
        }
        ties = {pair for _, reported in reported_of.values() for pair in reported.ties}
        groups = dict.fromkeys(plan.group_of(stage) for stage in range(plan.mesh.pp)) if reported_of else ()
        for group in groups:
            needed = [_first(choices, reported_of) for choices in _needed(plan, group, ties)]
            senders = dict(there for there in needed if there is not None)
            if None in needed:
                continue
            spans = [(reported.first, _last(reported, voted)) for reported in senders.values()]
            log = replayable(generation, group, spans, tuple(senders))
            found += [log] if log is not None else []
    return tuple(found)


def _needed(
    plan: Plan, group: tuple[int, int], ties: Collection[tuple[int, int]]
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Whose logs a replay reads, as (stage, place in it): one of each choice.

    Of neighbours every rank that other micro-batches go through; ranks that differ in tp or cp sent the same.
    Of stages that share a parameter one rank for every shard.
    """
    size = plan.mesh.size // plan.mesh.pp
    inner = plan.mesh.copy_size
    inside = range(*group)
    for stage in sorted({group[0] - 1, group[1]} & set(range(plan.mesh.pp))):
        yield from (((stage, index),) for index in range(0, size, plan.mesh.block_size))
    tied = {b if a in inside else a for a, b in ties if (a in inside) != (b in inside)}
    for stage in sorted(tied):
        yield from (tuple((stage, i) for i in range(part, size, inner)) for part in range(inner))


def _first(
    choices: Iterable[tuple[int, int]], reported_of: Mapping[tuple[int, int], tuple[str, Sent]]
) -> tuple[str, Sent] | None:
    return next((reported_of[at] for at in choices if at in reported_of), None)


def _last(reported: Sent, voted: Collection[tuple[int, int]]) -> int:
    return reported.last + (reported.ahead and (reported.generation, reported.last + 1) in voted)
