"""The simulated storms find what they are for: each old fault, planted again, breaks what it should."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from elastic_train.control import deadlines, failure, forming, incidents, transition, unanswered_commits
from elastic_train.control.causes import CauseKind
from elastic_train.control.events import NodesChanged
from elastic_train.control.fault_schedule import (
    AddNode,
    FailStorage,
    KillController,
    KillNode,
    KillRank,
    Moment,
)
from elastic_train.control.states import Ended, Outcome, State
from elastic_train.testing.simulated_faults import (
    AnyFault,
    BlindObserver,
    CutOff,
    Evaluate,
    LoseCommits,
    SlowCode,
    Weather,
)
from elastic_train.testing.simulated_storage import SimulatedStorage
from elastic_train.testing.simulator import Simulation, simulated_policy

pytestmark = pytest.mark.ring0
SEEDS = 60
"""Seeds that are tried until one finds it. Where the fault depends on no chance it is the first."""


def at(step: int, phase: Any = "forward") -> Moment:
    return Moment(step=step, phase=phase)


def unchanged(state: State, *_: Any) -> Outcome:
    return Outcome(state=state)


def who_is_not_listed_is_lost(state: State, event: NodesChanged, policy: Any) -> Outcome:
    there = {node.name for node in event.nodes}
    kinds: dict[str, CauseKind] = {
        w.node: "death" for w in state.facts.membership.workers if w.node not in there
    }
    state = replace(
        state, facts=replace(state.facts, membership=replace(state.facts.membership, nodes=event.nodes))
    )
    lost = failure.nodes_lost(state, kinds, policy, event.at)
    return lost.then(lambda s: transition.staff(s, policy, event.at))


def goes_on_without_the_log(state: State, at: float) -> Outcome:
    state = replace(state, facts=replace(state.facts, saves=replace(state.facts.saves, unsure=False)))
    return forming.try_form(state, simulated_policy(replicas=1), at)


def all_attempts_stay(facts: Any, stored: Any, *, trusted: bool) -> Any:
    found = unanswered_commits.with_newest(facts, stored, trusted=trusted)
    return replace(found, saves=replace(found.saves, attempts=facts.saves.attempts))


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A fault of old in the place of what mends it, and the weather in which it shows, as what."""

    place: Any
    name: str
    by: Callable[..., Any]
    weather: tuple[AnyFault, ...]
    shows: str
    policy: dict[str, Any]


def planted(
    place: Any, name: str, by: Callable[..., Any], *faults: AnyFault, shows: str, **policy: Any
) -> Planted:
    return Planted(place=place, name=name, by=by, weather=faults, shows=shows, policy=policy)


LOST = tuple(KillRank(when=at(9), rank=rank) for rank in range(4))
FAULTS = {
    "a commit without an answer is waited for for ever": planted(
        deadlines,
        "order_again",
        unchanged,
        LoseCommits(when=at(15), count=1),
        shows="a deadline is kept: the commit of step 15",
    ),
    "a run starts afresh beside a commit that came true": planted(
        forming,
        "read_log",
        goes_on_without_the_log,
        LoseCommits(when=at(3), count=12),
        *LOST,
        shows="a run that committed never starts afresh",
        replicas=1,
    ),
    "an ousted controller still journals": planted(
        SimulatedStorage,
        "journals",
        lambda self, term: True,
        *(LoseCommits(when=at(step), count=3) for step in (3, 7)),
        *(KillController(when=at(step)) for step in (5, 6, 9)),
        shows="the journal folds to the state",
    ),
    "a group that was not told to train is waited for for ever": planted(
        deadlines.resend_commands,
        "begin",
        unchanged,
        CutOff(when=at(4, "forming"), nodes=("b",), seconds=15.0, orders=True),
        KillNode(when=at(4), node="a"),
        shows="a deadline is kept: the group to begin",
    ),
    "a boundary has a fixed deadline": planted(
        deadlines,
        "pause_due_at",
        lambda facts, phase, policy, moved: phase.since + policy.timing.settle_s + 3 * facts.measured.step_s,
        KillNode(when=at(1), node="d"),
        Evaluate(when=at(3, "save"), seconds=200.0, mark_s=5.0),
        AddNode(when=at(3, "save"), node="e"),
        shows="2 failures",
    ),
    "forming has a fixed deadline, whatever the job's code does": planted(
        deadlines,
        "forming_due_at",
        lambda phase, policy, moved: phase.since + policy.timing.form_s,
        SlowCode(when=at(5), seconds=100.0),
        KillRank(when=at(5, "backward"), rank=0),
        shows="2 failures",
    ),
    "trouble of storage is charged to machines": planted(
        incidents,
        "is_charged",
        lambda causes: True,
        *LOST,
        FailStorage(when=at(9), seconds=40.0),
        shows="[2-9] failures",
        replicas=1,
    ),
    "one observer's word buries everybody": planted(
        transition,
        "_nodes_changed",
        who_is_not_listed_is_lost,
        BlindObserver(when=at(6), seconds=3.0),
        shows="survivors are never stopped without need",
    ),
}


def played(fault: Planted, seed: int) -> str:
    """What became of a run: the invariant that broke, or how it ended and what was counted."""
    simulation = Simulation(
        policy=simulated_policy(**fault.policy), schedule=Weather(faults=fault.weather, seed=seed)
    )
    try:
        simulation.run()
    except AssertionError as broken:
        return str(broken)
    phase, count = simulation.controller.state.phase, simulation.controller.state.facts.failures.ever
    assert isinstance(phase, Ended)
    return f"{phase.outcome} with {count} failures"


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_old_breaks_what_names_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    mended = [played(fault, seed) for seed in range(8)]
    assert all(text.startswith("finished") for text in mended), mended
    monkeypatch.setattr(fault.place, fault.name, fault.by)
    found = ""
    for seed in range(SEEDS):
        found = played(fault, seed)
        if re.search(fault.shows, found):
            break
    else:
        pytest.fail(f"no seed finds it; the last: {found}")
    assert not any(re.search(fault.shows, text) for text in mended), mended
