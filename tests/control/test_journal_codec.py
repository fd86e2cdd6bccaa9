from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.control.dataclass_json import plain, reader
from elastic_train.control.events import (
    Cause,
    CheckpointCommitted,
    Event,
    FinalReport,
    PeersHeld,
    StepCommitted,
    Tick,
)
from elastic_train.control.fault_schedule import storm
from elastic_train.control.journal_codec import (
    EVENTS,
    FLAT,
    GROUPS,
    decode,
    decode_state,
    encode,
    encode_state,
    fold,
)
from elastic_train.control.states import Declined, State
from elastic_train.recovery.evidence import LocalState, Stored, Vote
from elastic_train.testing.simulator import Simulation, simulated_policy

pytestmark = pytest.mark.ring0


def through_json(event: Event) -> Event:
    return decode(json.loads(json.dumps(encode(event), allow_nan=False)))


@settings(max_examples=150)
@given(event=st.one_of(*(st.from_type(kind) for kind in get_args(Event))))
def test_every_event_survives_json_exactly(event: Any):
    back = through_json(event)
    assert type(back) is type(event)
    assert repr(back) == repr(event)  # nan equals nothing, its text does


@pytest.mark.parametrize(
    ("value", "later"),
    [
        (PeersHeld(at=0.0, node="a", step=1, every=1.0, own=1, copies=0, room=0, spilled=0), {"cost_s"}),
        (Declined(idle=("w0",), at=1.0), {"slow"}),
    ],
)
def test_what_an_earlier_release_wrote_is_read(value: Any, later: set[str]):
    record = {key: entry for key, entry in plain(value).items() if key not in later}
    assert reader(type(value))(record) == value


def known(said: Any, kept: Any) -> Any:
    """What is said without fields that were not there yet when something was kept."""
    if isinstance(kept, dict):
        return {name: known(said[name], kept[name]) for name in kept}
    if isinstance(kept, list):
        return [known(one, other) for one, other in zip(said, kept, strict=True)]
    return said


def test_a_state_that_was_kept_before_facts_had_groups_is_read():
    kept = json.loads((Path(__file__).parent / "state_before_groups.json").read_text())
    state = decode_state(kept)
    said = encode_state(state)
    facts = {name: value for name, value in said["facts"].items() if name not in GROUPS}
    for group in GROUPS:
        facts |= {FLAT.get((group, name), name): value for name, value in said["facts"][group].items()}
    facts["type"] = "Facts"
    assert known(facts, kept["facts"]) == kept["facts"]
    assert {name: said["phase"][name] for name in kept["phase"]} == kept["phase"]
    assert state.facts.failures.ever == 3
    assert decode_state(said) == state


def test_numbers_that_json_lacks_survive():
    event = StepCommitted(
        at=1.0,
        generation=1,
        step=2,
        loss=math.nan,
        tokens=math.inf,
        grad_norm=-math.inf,
        skipped=True,
        seconds=0.1,
        vote=(math.nan, 1e-300),
    )
    assert repr(through_json(event)) == repr(event)


def test_nested_values_survive():
    local_state = LocalState(
        generation=3, rank=1, step=4, reached=5, applied=Vote(step=4, values=(0.1, 1 / 3))
    )
    cause = Cause(kind="engine", detail="x", traceback="a\nb")
    event = FinalReport(at=0.1, generation=3, worker="w", local_states=(local_state,), error=cause)
    assert through_json(event) == event


def test_a_newer_releases_fields_are_ignored_and_an_older_ones_are_filled_in():
    assert decode({"type": "Tick", "at": 2, "colour": "blue"}) == Tick(at=2.0)
    stored = {"slot": 1, "step": 2, "generation": 3, "term": 4, "path": "p", "size": 9}
    assert decode({"type": "CheckpointCommitted", "at": 0.0, "stored": stored}) == CheckpointCommitted(
        at=0.0, stored=Stored(slot=1, step=2, generation=3, term=4, path="p")
    )


def test_an_unknown_event_is_refused():
    with pytest.raises(KeyError):
        decode({"type": "Earthquake", "at": 0.0})


def test_a_field_that_must_be_there_is_missed():
    with pytest.raises(KeyError):
        decode({"type": "FencedOff", "at": 0.0})


def test_every_event_has_a_name():
    assert set(EVENTS.values()) == set(get_args(Event))


@pytest.mark.parametrize("seed", range(5))
def test_the_journal_folds_to_the_state_after_a_round_trip(seed):
    policy = simulated_policy(replicas=1 + seed % 2)
    schedule = storm(seed, steps=15, nodes=("a", "b", "c", "d"), ranks=4, faults=4)
    simulation = Simulation(policy=policy, schedule=schedule)
    simulation.run()
    assert fold(map(through_json, simulation.journal), policy) == simulation.controller.state


@pytest.mark.parametrize("seed", range(6))
def test_a_state_survives_json_and_the_rest_of_the_journal_folds_to_the_same(seed):
    policy = simulated_policy(stages=seed % 3 == 0, replicas=1 + seed % 2)
    schedule = storm(seed, steps=15, nodes=("a", "b", "c", "d"), ranks=4, faults=5)
    simulation = Simulation(policy=policy, schedule=schedule)
    simulation.run()
    final, state = fold(simulation.journal, policy), State()
    for number, event in enumerate(simulation.journal):
        back = decode_state(json.loads(json.dumps(encode_state(state), allow_nan=False)))
        assert back == state
        if number % 50 == 0:
            assert fold(simulation.journal[number:], policy, back) == final
        state = fold([event], policy, state)


def test_a_state_of_another_release_that_lacks_a_phase_is_refused():
    said = encode_state(State())
    with pytest.raises(KeyError):
        decode_state(said | {"phase": {"type": "Dreaming"}})
