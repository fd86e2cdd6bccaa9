from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.planner.plan import Mesh, Plan, even_shares
from elastic_train.recovery.choose_recovery import Choice, Evidence, Unrecoverable, choose, holders
from elastic_train.recovery.evidence import Fresh, FromStorage, Live, LocalState, Stored, Vote

pytestmark = pytest.mark.ring0


def plan(replicas: int, shards: int) -> Plan:
    mesh = Mesh(dp_replicate=replicas, dp_shard=shards)
    names = tuple(f"w{rank}" for rank in range(mesh.size))
    return Plan(mesh=mesh, workers=names, nodes=names, shares=even_shares(8, mesh.dp))


def vote(step: int) -> Vote:
    return Vote(step=step, values=(step / 10,))


def held(
    rank: int, step: int, *, generation: int = 1, reached: int | None = None, applied: int | None = None
):
    return LocalState(
        generation=generation,
        rank=rank,
        step=step,
        reached=reached,
        applied=vote(applied) if applied is not None else None,
    )


def evidence(*local_states: LocalState, **values: Any) -> Evidence:
    """Each holding by a worker of its own, under two replicas of two shards."""
    fields: dict[str, Any] = {
        "lineage": ((1, 0),),
        "plans": {1: plan(2, 2)},
        "step": 10,
        "seen": None,
        "stored": None,
        "ever_stored": False,
    }
    named = tuple((f"w{place}", (local_state,)) for place, local_state in enumerate(local_states))
    return Evidence(local_states=named, **{**fields, **values})


def checkpoint(step: int, generation: int = 1) -> Stored:
    return Stored(slot=step, step=step, generation=generation, term=1, path=f"checkpoints/{step}")


def chosen(given_evidence: Evidence) -> Choice:
    choice = choose(given_evidence)
    assert isinstance(choice, Choice)
    return choice


def test_one_replica_of_every_part_keeps_the_step():
    choice = chosen(evidence(held(0, 10), held(3, 10)))
    assert choice == Choice(
        origin=Live(generation=1, step=10),
        step=10,
        lost=0,
        reason="2 workers hold step 10 of generation 1; no committed step is lost",
    )


def test_laggards_roll_forward_with_the_vote_of_one_that_passed():
    choice = chosen(evidence(held(0, 10, applied=10), held(1, 9, reached=10)))
    assert choice.origin == Live(generation=1, step=10, vote=vote(10))
    assert "rolling forward" in choice.reason


def test_laggards_roll_forward_with_the_vote_that_the_controller_saw():
    choice = chosen(evidence(held(0, 9, reached=10), held(1, 9, reached=10), seen=(1, vote(10))))
    assert choice.origin == Live(generation=1, step=10, vote=vote(10))


def test_without_the_votes_outcome_the_step_is_run_again():
    choice = chosen(evidence(held(0, 9, reached=10), held(1, 9, reached=10), step=9))
    assert choice.origin == Live(generation=1, step=9)
    assert choice.lost == 0


def test_a_vote_of_another_generation_decides_nothing():
    given_evidence = evidence(held(0, 9, reached=10), held(1, 9, reached=10), seen=(2, vote(10)))
    assert chosen(given_evidence).origin == Live(generation=1, step=9)


def test_a_laggard_without_its_gradient_brings_everybody_back():
    older = held(0, 9)
    choice = chosen(evidence(held(0, 10, applied=10), held(1, 9), older))
    assert choice.origin == Live(generation=1, step=9)
    assert choice.lost == 1
    assert "1 committed step is run again" in choice.reason


def test_a_committed_step_that_nobody_covers_falls_to_the_checkpoint():
    choice = chosen(evidence(held(0, 10), held(2, 10), stored=checkpoint(6), ever_stored=True))
    assert choice.origin == FromStorage(stored=checkpoint(6))
    assert choice.lost == 4
    assert "nobody holds the part of rank 1 of generation 1" in choice.reason


def test_a_newer_checkpoint_is_better_than_older_memory():
    choice = chosen(evidence(held(0, 5), held(1, 5), stored=checkpoint(8), ever_stored=True))
    assert choice.step == 8
    assert "covers no newer step" in choice.reason


def test_memory_is_preferred_to_a_checkpoint_of_the_same_step():
    choice = chosen(evidence(held(0, 8), held(1, 8), stored=checkpoint(8), ever_stored=True))
    assert isinstance(choice.origin, Live)


def test_of_equal_steps_the_younger_generation_is_taken():
    given_evidence = evidence(
        held(0, 5),
        held(1, 5),
        held(0, 5, generation=2),
        lineage=((1, 0), (2, 5)),
        plans={1: plan(2, 2), 2: plan(2, 1)},
    )
    assert chosen(given_evidence).origin == Live(generation=2, step=5)


def test_a_tiling_never_mixes_generations():
    given_evidence = evidence(
        held(0, 5),
        held(1, 5, generation=2),
        lineage=((1, 0), (2, 5)),
        plans={1: plan(1, 2), 2: plan(1, 2)},
    )
    assert chosen(given_evidence).origin == Fresh()


def test_newer_state_of_a_generation_that_was_left_is_dead():
    given_evidence = evidence(
        held(0, 9),
        held(1, 9),
        held(0, 6, generation=2),
        lineage=((1, 0), (2, 5)),
        plans={1: plan(2, 2), 2: plan(2, 1)},
    )
    assert chosen(given_evidence).origin == Live(generation=2, step=6)


def test_state_of_an_unknown_generation_counts_for_nothing():
    choice = chosen(evidence(held(0, 9, generation=3), held(1, 9, generation=3)))
    assert choice.origin == Fresh()
    assert "belongs to no generation of the lineage" in choice.reason


def test_state_whose_plan_is_forgotten_counts_for_nothing():
    assert chosen(evidence(held(0, 9), held(1, 9), plans={})).origin == Fresh()


def test_only_a_run_that_never_committed_starts_afresh():
    assert chosen(evidence()).origin == Fresh()
    assert chosen(evidence()).reason == (
        "from step 0: no checkpoint was ever committed and no worker holds any state; "
        "10 committed steps are run again"
    )
    assert choose(evidence(ever_stored=True)) == Unrecoverable(
        reason="the run committed checkpoints and none of them can be read; no worker holds any state"
    )


def test_memory_saves_a_run_whose_checkpoints_are_all_lost():
    assert chosen(evidence(held(0, 10), held(1, 10), ever_stored=True)).step == 10


def test_the_holders_are_those_that_stand_at_the_origin_or_can_come_there():
    given_evidence = evidence(held(0, 10, applied=10), held(1, 9, reached=10), held(2, 8), held(3, 9))
    origin = chosen(given_evidence).origin
    assert holders(given_evidence, origin) == ("w0", "w1")
    assert holders(given_evidence, Fresh()) == ()


@settings(deadline=None)
@given(
    replicas=st.integers(1, 3),
    shards=st.integers(1, 3),
    steps=st.lists(st.tuples(st.integers(0, 8), st.integers(4, 6), st.booleans()), max_size=9),
    stored=st.none() | st.integers(1, 7),
)
def test_the_choice_is_the_newest_step_that_a_search_by_hand_finds(replicas, shards, steps, stored):
    size = replicas * shards
    local_states = [
        held(rank % size, step, reached=step + 1 if reached else None, applied=step)
        for rank, step, reached in steps
    ]
    given_evidence = evidence(
        *local_states,
        plans={1: plan(replicas, shards)},
        stored=checkpoint(stored) if stored else None,
        ever_stored=stored is not None,
    )
    voted = {h.step for h in local_states}
    possible = [
        step
        for step in range(8)
        if {
            h.rank % shards
            for h in local_states
            if h.step == step or (h.step == step - 1 and h.reached == step and step in voted)
        }
        == set(range(shards))
    ]
    choice = chosen(given_evidence)
    assert choice.step == max((*possible, stored or 0))
    assert choice.lost == 10 - choice.step
