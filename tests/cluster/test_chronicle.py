"""A controller that begins from a kept state stands where one stands that folds everything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.cluster.controller import chronicle as chronicle_module
from elastic_train.cluster.controller.chronicle import Chronicle
from elastic_train.control.events import Adopted, Node, NodesChanged, TermBegan, Tick
from elastic_train.control.fault_schedule import storm
from elastic_train.control.journal_codec import changed, fold
from elastic_train.control.membership import number_of
from elastic_train.control.policy import Policy
from elastic_train.control.states import Ended, State, Waiting
from elastic_train.control.transition import transition
from elastic_train.observe.journal_records import from_json, record, wall_text
from elastic_train.observe.run_summary import summary_of
from elastic_train.storage.journal import Journal, read_journal
from elastic_train.storage.journal_reading import coverings, newest_covering
from elastic_train.storage.memory_store import MemoryStore
from elastic_train.storage.store import Store
from elastic_train.testing.simulator import Simulation, simulated_policy

pytestmark = pytest.mark.ring1


def begun(store: Store, term: int, policy: Policy) -> tuple[Journal, Chronicle, State]:
    journal = Journal(store, term)
    chronicle = Chronicle(store, journal, policy, every=20)
    return journal, chronicle, chronicle.begin()


def lived(store: Store, seed: int) -> tuple[Policy, State]:
    """A storm's events, written down by one controller after the other."""
    policy = simulated_policy(stages=seed % 3 == 0, replicas=1 + seed % 2)
    schedule = storm(seed, steps=15, nodes=("a", "b", "c", "d"), ranks=4, faults=5)
    simulation = Simulation(policy=policy, schedule=schedule)
    simulation.run()
    journal, chronicle, state = begun(store, 1, policy)
    for number, event in enumerate(simulation.journal):
        outcome = transition(state, event, policy)
        if changed(state, outcome):
            chronicle.note(record(number, wall_text(1.7e9 + number), event, outcome), outcome.state)
        state = outcome.state
        if number % 7 == 0:
            journal.flush()
        if number % 61 == 60:
            journal.flush()
            before = state
            journal, chronicle, state = begun(store, 2 + number // 61, policy)
            assert state == before
    journal.flush()
    return policy, state


@pytest.mark.parametrize("seed", range(6))
def test_a_kept_state_and_what_follows_are_the_whole_journal(seed: int) -> None:
    store = MemoryStore()
    policy, state = lived(store, seed)
    assert coverings(store)
    records = [from_json(line) for _, part in read_journal(store) for line in part]
    assert fold([r.event for r in records], policy) == state
    _, chronicle, again = begun(store, 999, policy)
    assert again == state
    assert chronicle._summary == summary_of(records)
    assert chronicle.wall_s == records[-1].seconds


def others(policy: Policy) -> list[Policy]:
    """What a person may say when the run is submitted again."""
    return [
        replace(policy, min_workers=1, max_workers=2),
        replace(policy, min_workers=4, max_workers=8),
        replace(policy, max_steps=7),
        replace(policy, max_steps=30),
        replace(policy, max_failures=0),
        replace(policy, standby=0, peers=True),
        replace(policy, evict_slower_than=1.5, checkpoints=replace(policy.checkpoints, keep=1)),
    ]


@pytest.mark.parametrize("seed", range(12))
def test_a_run_that_is_submitted_with_other_options_goes_on_from_its_newest_checkpoint(seed: int) -> None:
    store = MemoryStore()
    policy, state = lived(store, seed)
    newest = state.facts.saves.stored
    for term, other in enumerate(others(policy), start=990):
        _, _, again = begun(store, term, other)
        assert again.facts.lineage.generation >= state.facts.lineage.generation
        assert again.facts.membership.born >= max(
            (number_of(w.name) for w in state.facts.membership.workers if w.status == "ready"), default=0
        )
        for event in (
            TermBegan(at=5.0, term=term, stored=newest, ever_stored=newest is not None),
            Adopted(at=5.0, running=()),
            NodesChanged(at=5.1, nodes=tuple(Node(name=name, slots=1) for name in "pqrs")),
        ):
            again = transition(again, event, other).state
        if isinstance(again.phase, Ended):
            assert newest is not None
            assert newest.step >= other.max_steps
            continue
        assert again.facts.saves.stored == newest
        assert isinstance(again.phase, Waiting)
        assert again.facts.membership.workers


def test_a_state_of_a_release_to_come_is_passed_over() -> None:
    store = MemoryStore()
    policy, state = lived(store, 1)
    found = newest_covering(store)
    assert found is not None
    path = f"journal/state-{found.slot:08d}.json"
    store.write(path, store.read(path).replace(b'"type":"State"', b'"type":"State","x":1'))
    assert begun(store, 998, policy)[2] == state  # a field that nobody knows is nothing to care about
    store.write(path, store.read(path).replace(b'"phase":{"type":"', b'"phase":{"type":"Un'))
    assert begun(store, 999, policy)[2] == state


def test_many_small_parts_are_covered_before_many_records_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chronicle_module, "PARTS", 60)
    store, policy = MemoryStore(), simulated_policy()
    journal = Journal(store, 1)
    chronicle = Chronicle(store, journal, policy)
    state = chronicle.begin()
    for number in range(400):
        event = Tick(at=float(number))
        outcome = transition(state, event, policy)
        state = outcome.state
        chronicle.note(record(number, wall_text(1.7e9 + number), event, outcome), state)
        journal.flush()
        assert journal.uncovered <= 61
    assert begun(store, 2, policy)[2] == state
