"""One incident is one failure, in whatever order its words arrive."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.control.events import (
    Cause,
    Event,
    FinalReport,
    GroupBroken,
    Node,
    NodesChanged,
    StepCommitted,
    WorkerLost,
)
from elastic_train.control.incidents import heard
from elastic_train.control.journal_codec import fold
from elastic_train.control.policy import Policy
from elastic_train.control.states import Ended, Forming, Running, Settling, members
from elastic_train.recovery.evidence import LocalState
from elastic_train.testing.simulated_planners import SimplePlanner
from elastic_train.testing.simulator import simulated_policy
from tests.control.conftest import Play

pytestmark = pytest.mark.ring0

RESET = Cause(kind="collective", detail="connection reset")
POLICY = replace(simulated_policy(max_steps=10_000, max_failures=3), standby=0, max_workers=4)


def nodes(names: str, leaving: str = "") -> NodesChanged:
    return NodesChanged(
        at=0.0, nodes=tuple(Node(name=n, slots=1, drain_by=900.0 if n in leaving else None) for n in names)
    )


def lost(worker: str, kind: str = "death") -> WorkerLost:
    return WorkerLost(at=0.0, worker=worker, cause=Cause(kind=kind, detail=f"{worker} is gone"))


def broken(worker: str, cause: Cause = RESET) -> GroupBroken:
    return GroupBroken(at=0.0, generation=1, worker=worker, cause=cause)


def word(rank: int, step: int = 5, error: Cause | None = RESET) -> FinalReport:
    held = LocalState(generation=1, rank=rank, step=step)
    return FinalReport(at=0.0, generation=1, worker=f"w000{rank + 1}", local_states=(held,), error=error)


def after(events: Sequence[Event], policy: Policy = POLICY) -> Play:
    """A group of four that trained to step 5, after these events, and after everything that follows from them
    by itself: members of groups that were formed meanwhile settle where they are asked to.
    """
    play = Play(policy)
    play.running(4, step=5)
    for event in events:
        play.at += 0.1
        play(type(event), **{f: getattr(event, f) for f in event.__slots__ if f != "at"})
    for _ in range(6):
        if isinstance(play.phase, Settling):
            for name in members(play.phase):
                kept = dict(play.facts.survived.local_states).get(name, ())
                play(
                    FinalReport,
                    generation=play.facts.lineage.generation,
                    worker=name,
                    local_states=kept,
                )
    assert fold(play.journal, play.policy) == play.state
    return play


INCIDENTS: dict[str, tuple[int, list[Event]]] = {
    "a death": (1, [lost("w0004"), broken("w0001"), word(0), word(1), word(2)]),
    "a death that nobody felt": (1, [lost("w0004"), word(0, error=None), word(1), word(2)]),
    "a death after its final report": (
        1,
        [lost("w0004"), broken("w0001"), word(0), word(1), word(2), word(3)],
    ),
    "two deaths of one machine": (1, [lost("w0003"), lost("w0004"), word(0), word(1)]),
    "two deaths after their final reports": (1, [lost("w0003"), lost("w0004"), *map(word, range(4))]),
    "a death on a node with notice": (
        0,
        [nodes("abcd", leaving="d"), lost("w0004"), broken("w0001"), word(0), word(1), word(2)],
    ),
    "a collective that raised": (1, [broken("w0001"), *map(word, range(4))]),
    "an engine fault that others felt": (
        1,
        [broken("w0001"), *map(word, range(3)), word(3, error=Cause(kind="engine", detail="bad index"))],
    ),
    "storage that failed": (
        0,
        [
            broken("", Cause(kind="storage", detail="503")),
            word(0, error=Cause(kind="storage", detail="503")),
            *map(word, range(1, 4)),
        ],
    ),
    "storage and a death": (
        1,
        [broken("", Cause(kind="storage", detail="503")), lost("w0004"), *map(word, range(3))],
    ),
}


def orders(events: list[Event]) -> Iterator[Sequence[Event]]:
    """Every order of a few words, and some of more."""
    if len(events) < 5:
        return permutations(events)
    draw = random.Random(0)
    return (draw.sample(events, len(events)) for _ in range(50))


@pytest.mark.parametrize("name", INCIDENTS)
def test_any_order_of_the_words_of_an_incident_gives_one_count(name):
    expected, events = INCIDENTS[name]
    for order in orders(events):
        play = after(order)
        reported = [type(e).__name__ + getattr(e, "worker", "") for e in order]
        assert play.facts.failures.count == play.facts.failures.ever == expected, reported
        assert isinstance(play.phase, Forming), reported


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_order_and_any_repetition_of_the_words_of_an_incident_gives_one_count(data):
    expected, events = INCIDENTS[data.draw(st.sampled_from(sorted(INCIDENTS)))]
    order = data.draw(st.permutations(events + data.draw(st.lists(st.sampled_from(events), max_size=4))))
    assert after(order).facts.failures.count == expected


def test_what_everybody_says_is_kept_once_and_the_same_in_any_order():
    """However large the group: a collective that failed, a store that refused, each in words of its own."""
    said = [
        Cause(kind=kind, detail=f"{kind} at {rank}", rank=rank)
        for kind in ("collective", "storage")
        for rank in range(50)
    ]
    said += [Cause(kind="death", detail=f"w{rank} ended", worker=f"w{rank}") for rank in range(3)]
    kept = set[frozenset[Cause]]()
    for seed in range(20):
        random.Random(seed).shuffle(said)
        causes: tuple[Cause, ...] = ()
        for cause in said:
            causes = heard(causes, cause)
        kept |= {frozenset(causes), frozenset(heard((), *said)), frozenset(heard(causes, *said))}
    (only,) = kept
    assert sorted(c.kind for c in only) == ["collective", "death", "death", "death", "storage"]


def test_the_main_cause_of_an_incident_is_the_same_in_any_order():
    memory = Cause(kind="memory", detail="full", step=6, rank=2)
    events = [broken("w0001"), word(0), word(1), word(2, error=memory), lost("w0004")]
    said = {after(order, replace(POLICY, max_failures=0)).phase.detail for order in permutations(events)}
    assert said == {"1 failure without progress between them, 0 are allowed; the last: full"}


# -- progress ------------------------------------------------------------------------------------------------


def sharded(**values) -> Play:
    """Nothing is held twice."""
    return Play(replace(POLICY, plan=SimplePlanner(replicas=9), **values))


def trained(play: Play, steps: int) -> None:
    """The group that forms trains so many steps on."""
    assert isinstance(play.phase, Forming), play.phase
    play.go()
    for step in range(play.facts.lineage.step + 1, play.facts.lineage.step + steps + 1):
        play.step(step)


def lose_all(play: Play) -> None:
    for worker in play.plan.workers:
        play.lose(worker)
    play.ready()
    play.wait(4.0)


def test_steps_that_are_committed_again_after_a_rollback_are_progress():
    play = sharded(max_workers=4)
    play.running(4, step=2000)
    play.saved(1000, slot=2)
    lose_all(play)
    assert play.facts.lineage.step == 1000
    for steps in (450, 300, 150, 449, 2, 77, 900, 20):
        trained(play, steps)
        assert play.facts.failures.count == 0
        lose_all(play)
        assert play.facts.lineage.step == 1000
        assert play.facts.failures.count == 1
    assert isinstance(play.phase, Forming)


def test_coming_to_the_same_step_again_and_again_is_none():
    """Wherever the rollback goes, and however long the way is."""
    play = sharded(max_workers=4)
    play.running(4, step=1450)
    play.saved(1000, slot=2)
    for _ in range(3):
        lose_all(play)
        trained(play, 450)
    lose_all(play)
    assert isinstance(play.phase, Ended)
    assert play.phase.detail.startswith("4 failures at step 1450, to which the run came again each time")


def test_a_failure_after_a_step_that_only_final_reports_tell_of_is_the_first_one():
    play = Play(POLICY)
    play.running(4, step=5)
    play.broken("w0001")
    play.settle()
    play.go()
    play.broken("w0001")
    play.settle(step=6)
    assert play.facts.failures.count == 1


def test_a_step_that_was_committed_before_a_failure_and_is_told_after_it_is_no_progress():
    play = Play(replace(POLICY, min_workers=4))
    play.running(4, step=5)
    play.nodes("abc")
    play.settle()
    assert play.facts.failures.count == 1
    play(
        StepCommitted,
        generation=1,
        step=6,
        loss=1.0,
        tokens=1.0,
        grad_norm=1.0,
        skipped=False,
        seconds=1.0,
        vote=(6.0,),
    )
    assert play.facts.lineage.step == 6
    assert play.facts.failures.count == 1


@pytest.mark.parametrize("way", ["lose", "break"])
def test_failures_without_a_step_between_them_count_each(way):
    play = Play(replace(POLICY, min_workers=1))
    play.running(4, step=5)
    for count in range(1, 4):
        if way == "lose":
            play.lose(play.plan.workers[-1])
        else:
            play.broken(play.plan.workers[0])
        play.settle()
        assert play.facts.failures.count == count
        play.go()
    assert isinstance(play.phase, Running)


def test_a_newcomer_that_dies_in_every_forming_spends_the_budget():
    play = Play(replace(POLICY, min_workers=4))
    play.running(4, step=5)
    for _ in range(5):
        if isinstance(play.phase, Ended):
            break
        play.lose(play.plan.workers[-1])
        play.ready()
        play.settle()
        play.wait(2.0)
    assert isinstance(play.phase, Ended)
    assert "without progress" in play.phase.detail
