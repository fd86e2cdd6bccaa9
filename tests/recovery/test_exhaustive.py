"""All small cases of what may be left, against a search by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from elastic_train.planner.plan import Mesh, Plan, even_shares
from elastic_train.recovery.choose_recovery import Choice, Evidence, choose, holders, options
from elastic_train.recovery.costs import Costs
from elastic_train.recovery.evidence import (
    FromStorage,
    Live,
    LocalState,
    Logged,
    Mixed,
    PeerSnapshot,
    Stored,
    Vote,
)
from elastic_train.recovery.local_state_versions import way
from elastic_train.recovery.rank_coverage import part, parts

pytestmark = pytest.mark.ring0

K = 5
VOTE = Vote(step=K + 1, values=(0.5,))


def plan_of(mesh: Mesh) -> Plan:
    names = tuple(f"w{rank}" for rank in range(mesh.size))
    return Plan(mesh=mesh, workers=names, nodes=names, shares=even_shares(8, mesh.dp))


def evidence(mesh: Mesh, held: dict[int, LocalState], *, step: int = K, **values: object) -> Evidence:
    fields: dict = {
        "lineage": ((1, 0),),
        "plans": {1: plan_of(mesh)},
        "seen": None,
        "stored": None,
        "ever_stored": False,
        **values,
    }
    named = tuple((f"w{rank}", (local_state,)) for rank, local_state in held.items())
    return Evidence(local_states=named, step=step, **fields)


def stored(step: int, generation: int = 1) -> Stored:
    return Stored(slot=step, step=step, generation=generation, term=1, path=f"step-{step}")


# -- which survivors are at k or k + 1, wholly ---------------------------------------------------------------

WHOLE = {
    "dead": None,
    "k": LocalState(generation=1, rank=0, step=K),
    "k, gradient": LocalState(generation=1, rank=0, step=K, reached=K + 1),
    "k+1": LocalState(generation=1, rank=0, step=K + 1, applied=VOTE),
    "k+1, gradient": LocalState(generation=1, rank=0, step=K + 1, applied=VOTE, undoable=True),
}
LEADS = {  # which steps a rank can stand at, and whether to the bit; a roll forward needs the vote
    "k": {K: True},
    "k, gradient": {K: True, K + 1: True},
    "k+1": {K + 1: True},
    "k+1, gradient": {K + 1: True, K: False},
}


def at_rank(local_state: LocalState, rank: int) -> LocalState:
    return LocalState(
        generation=local_state.generation,
        rank=rank,
        step=local_state.step,
        reached=local_state.reached,
        applied=local_state.applied,
        undoable=local_state.undoable,
    )


@pytest.mark.parametrize(
    "mesh", [Mesh(dp_replicate=2), Mesh(dp_shard=2), Mesh(dp_replicate=2, dp_shard=2), Mesh(pp=2)]
)
@pytest.mark.parametrize("checkpoint", [None, K - 1, K])
def test_every_mixture_of_survivors_goes_on_from_the_newest_step_they_can_assemble(
    mesh: Mesh, checkpoint: int | None
) -> None:
    for states in itertools.product(WHOLE, repeat=mesh.size):
        held = {r: at_rank(h, r) for r, s in enumerate(states) if (h := WHOLE[s]) is not None}
        given = evidence(
            mesh,
            held,
            step=K + 1 if any(s.startswith("k+1") for s in states) else K,
            stored=stored(checkpoint) if checkpoint else None,
            ever_stored=checkpoint is not None,
        )
        known = any(h.applied for h in held.values())
        possible: dict[int, bool] = {}
        for step in (K, K + 1):
            leads: dict[tuple[int, int], list[bool]] = {}
            for rank in held:
                state = states[rank]
                if step in LEADS[state] and (known or state != "k, gradient" or step == K):
                    leads.setdefault(part(mesh, rank), []).append(LEADS[state][step])
            if set(leads) == set(parts(mesh)):
                possible[step] = all(any(found) for found in leads.values())
        choice = choose(given)
        assert isinstance(choice, Choice), states
        if not possible or (checkpoint or 0) > max(possible):
            assert choice.step == (checkpoint or 0), states
            continue
        step = max(possible)
        assert choice.step == step, states
        if not possible[step] and checkpoint == step:
            assert isinstance(choice.origin, FromStorage | Mixed), f"{states}: exact is better than an undo"
            continue
        if isinstance(choice.origin, Mixed):
            continue
        assert isinstance(choice.origin, Live)
        assert choice.origin.undo is not possible[step], f"{states}: an undo only where nothing is exact"
        serving = {rank for rank in held if f"w{rank}" in holders(given, choice.origin)}
        assert {part(mesh, rank) for rank in serving} == set(parts(mesh)), states


# -- which parameters of which survivors are at k or k + 1 ---------------------------------------------------

NAMES = ("a", "b", "c")


def partial(rank: int, states: tuple[str, ...], undoable: bool) -> LocalState:
    """A survivor whose parameters are each at k, at k with the gradient, or at k + 1."""
    ahead = tuple(n for n, s in zip(NAMES, states, strict=True) if s == "k+1")
    if len(ahead) == len(NAMES):
        return LocalState(generation=1, rank=rank, step=K + 1, applied=VOTE, undoable=undoable)
    return LocalState(
        generation=1,
        rank=rank,
        step=K,
        ahead=ahead,
        kept=tuple(n for n, s in zip(NAMES, states, strict=True) if s == "k, gradient"),
        behind=tuple(n for n, s in zip(NAMES, states, strict=True) if s == "k"),
        passed=VOTE if ahead else None,
        undoable=undoable,
    )


def all_partial() -> Iterator[tuple[tuple[tuple[str, ...], ...], bool]]:
    each = list(itertools.product(("k", "k, gradient", "k+1"), repeat=len(NAMES)))
    for first, second in itertools.combinations_with_replacement(each, 2):
        for undoable in (False, True):
            yield (first, second), undoable


def test_every_interrupted_update_is_reconciled_parameter_by_parameter() -> None:
    """Two replicas, three parameters, each where the interruption left it: 756 cases."""
    mesh = Mesh(dp_replicate=2)
    for survivors, undoable in all_partial():
        held = {rank: partial(rank, states, undoable) for rank, states in enumerate(survivors)}
        given = evidence(mesh, held)
        voted = any("k+1" in states for states in survivors)
        forward = all(
            any(states[i] == "k+1" or (voted and states[i] == "k, gradient") for states in survivors)
            for i in range(len(NAMES))
        )
        back = all(any(states[i] != "k+1" for states in survivors) or undoable for i in range(len(NAMES)))
        exact_back = all(any(states[i] != "k+1" for states in survivors) for i in range(len(NAMES)))
        found = options(given)
        assert any(c.step == K + 1 for c in found) is forward, survivors
        assert any(c.step == K for c in found) is back, (survivors, undoable)
        assert all(c.exact for c in found if c.step == K + 1)
        assert all(c.exact is exact_back for c in found if c.step == K), survivors
        for candidate in found:
            origin = candidate.origin
            assert isinstance(origin, Live)
            for name in NAMES:
                ways = {way(h, name, origin.step, origin.vote) for h in held.values()} - {None}
                assert ways - ({"undo"} if not origin.undo else set()), (survivors, name)


def test_each_parameter_of_an_interrupted_update_has_its_own_ways() -> None:
    held = LocalState(
        generation=1, rank=0, step=K, ahead=("a",), kept=("b",), behind=("c",), passed=VOTE, undoable=True
    )
    assert [way(held, n, K, VOTE) for n in NAMES] == ["undo", "live", "live"]
    assert [way(held, n, K + 1, VOTE) for n in NAMES] == ["live", "forward", None]
    assert [way(held, n, K - 1, VOTE) for n in NAMES] == [None, None, None]
    assert [way(held, n, K + 1, None) for n in NAMES] == ["live", None, None]


# -- two lineages --------------------------------------------------------------------------------------------


def test_two_lineages_that_hold_the_same_step_are_never_mixed() -> None:
    """Generation 1 went on to k + 1 after 2 had started from k - 1: one shard survives in each."""
    mesh = Mesh(dp_shard=2)
    plans = {1: plan_of(mesh), 2: plan_of(mesh)}
    for states in itertools.product(("k", "k, gradient", "k+1", "k+1, gradient"), repeat=2):
        for discarded in (0, 1):
            held = {}
            for rank, state in enumerate(states):
                local_state = WHOLE[state]
                assert local_state is not None
                made = at_rank(local_state, rank)
                held[rank] = made if rank == discarded else _of_generation(made, 2)
            given = evidence(mesh, held, lineage=((1, 0), (2, K - 1)), plans=plans)
            assert options(given) == ()
            copy = PeerSnapshot(peer_store="n", generation=1, rank=discarded, step=K)
            dead = evidence(mesh, held, lineage=((1, 0), (2, K - 1)), plans=plans, snapshots=(copy,))
            assert options(dead) == (), "a peer's copy of the discarded version counts for nothing"


def _of_generation(local_state: LocalState, generation: int) -> LocalState:
    return LocalState(
        generation=generation,
        rank=local_state.rank,
        step=local_state.step,
        reached=local_state.reached,
        applied=local_state.applied,
        undoable=local_state.undoable,
    )


def test_a_checkpoint_of_another_lineage_completes_no_mixture() -> None:
    held = {0: LocalState(generation=2, rank=0, step=K)}
    given = evidence(
        Mesh(pp=2),
        held,
        lineage=((1, 0), (2, 3)),
        plans={2: plan_of(Mesh(pp=2))},
        stored=stored(K, generation=1),
        ever_stored=True,
    )
    assert options(given) == ()


# -- peer memory, logs and storage beside survivors ----------------------------------------------------------


@pytest.mark.parametrize("mesh", [Mesh(pp=2), Mesh(dp_shard=2)])
def test_lost_parts_come_from_peer_memory_and_everybody_from_the_newest_complete_step(mesh: Mesh) -> None:
    """Each rank lives at k or is dead; each of its snapshots at k - 1 and k is there or not."""
    choices = list(itertools.product((True, False), repeat=3))
    for ranks in itertools.product(choices, repeat=mesh.size):
        held = {r: LocalState(generation=1, rank=r, step=K) for r, (lives, _, _) in enumerate(ranks) if lives}
        snapshots = tuple(
            PeerSnapshot(peer_store=f"n{rank}", generation=1, rank=rank, step=step)
            for rank, (_, older, newer) in enumerate(ranks)
            for step, there in ((K - 1, older), (K, newer))
            if there
        )
        choice = choose(evidence(mesh, held, snapshots=snapshots))
        assert isinstance(choice, Choice)
        newest = all(lives or newer for lives, _, newer in ranks)
        older = all(old for _, old, _ in ranks)
        assert choice.step == (K if newest else K - 1 if older else 0), ranks
        if newest and not all(lives for lives, _, _ in ranks):
            assert isinstance(choice.origin, Mixed)
            lost = {r for r, (lives, _, _) in enumerate(ranks) if not lives}
            assert {s.rank for s in choice.origin.peers} == lost
            assert "in the memory of" in choice.reason


def test_a_copy_in_shares_counts_when_every_share_is_there() -> None:
    def choice_with(*shares: tuple[int, int]) -> int:
        snapshots = tuple(
            PeerSnapshot(peer_store=f"n{i}", generation=1, rank=1, step=K, share=share)
            for i, share in enumerate(shares)
        )
        held = {0: LocalState(generation=1, rank=0, step=K)}
        choice = choose(evidence(Mesh(pp=2), held, snapshots=snapshots))
        assert isinstance(choice, Choice)
        return choice.step

    assert choice_with((0, 2), (1, 2)) == K
    assert choice_with((0, 2)) == 0
    assert choice_with((0, 2), (1, 3)) == 0
    assert choice_with((0, 2), (0, 1)) == K


@pytest.mark.parametrize("stages", [2, 3])
def test_a_lost_stage_is_replayed_exactly_where_its_log_reaches_from_a_base_to_the_step(stages: int) -> None:
    """Over the lost stage, where its log begins and ends, and where a base is left."""
    mesh = Mesh(pp=stages)
    for lost, first, last, base, kind in itertools.product(
        range(stages), range(1, K + 2), range(1, K + 2), range(K), ("peer", "storage")
    ):
        held = {r: LocalState(generation=1, rank=r, step=K) for r in range(stages) if r != lost}
        log = Logged(generation=1, stage=lost, first=first, last=last)
        peers = (PeerSnapshot(peer_store="n", generation=1, rank=lost, step=base),) if kind == "peer" else ()
        given = evidence(
            mesh,
            held,
            snapshots=peers,
            logs=(log,),
            stored=stored(base) if kind == "storage" and base else None,
            ever_stored=kind == "storage" and base > 0,
        )
        choice = choose(given)
        assert isinstance(choice, Choice)
        reaches = first <= base + 1 and last >= K  # without a checkpoint the seed gives the base
        if reaches:
            assert choice.step == K, (lost, first, last, base, kind)
            assert choice.lost == 0
            assert isinstance(choice.origin, Mixed)
            (replay,) = choice.origin.replays
            assert (replay.base, replay.log) == (base, log)
            assert f"stage {lost} is replayed from step {base}" in choice.reason
        else:
            assert choice.step == (base if kind == "storage" else 0), (lost, first, last, base, kind)


def test_of_several_ways_to_a_step_the_cheapest_is_taken() -> None:
    held = {0: LocalState(generation=1, rank=0, step=K)}
    logs = (Logged(generation=1, stage=1, first=1, last=K),)
    near = PeerSnapshot(peer_store="n", generation=1, rank=1, step=K - 1)
    far = PeerSnapshot(peer_store="m", generation=1, rank=1, step=1)
    here = PeerSnapshot(peer_store="o", generation=1, rank=1, step=K)

    def origin(*snapshots: PeerSnapshot, costs: Costs | None = None) -> Mixed:
        given = evidence(Mesh(pp=2), held, logs=logs, snapshots=snapshots, costs=costs or Costs())
        choice = choose(given)
        assert isinstance(choice, Choice)
        assert isinstance(choice.origin, Mixed)
        return choice.origin

    assert origin(far, near).replays[0].base == K - 1
    assert origin(far).replays[0].base == 1
    assert origin(far, near, here).replays == ()


def test_more_workers_make_a_replay_cheaper() -> None:
    held = {0: LocalState(generation=1, rank=0, step=K)}
    logs = (Logged(generation=1, stage=1, first=1, last=K),)
    base = PeerSnapshot(peer_store="m", generation=1, rank=1, step=0)

    def seconds(workers: int) -> float:
        costs = Costs(replayers=workers, stage_s=10.0)
        choice = choose(evidence(Mesh(pp=2), held, logs=logs, snapshots=(base,), costs=costs))
        assert isinstance(choice, Choice)
        return choice.seconds

    assert seconds(1) > seconds(2) > seconds(3)


def test_a_gap_in_the_log_means_the_next_rung() -> None:
    held = {0: LocalState(generation=1, rank=0, step=K)}
    logs = (
        Logged(generation=1, stage=1, first=1, last=2),
        Logged(generation=1, stage=1, first=4, last=K),
    )
    given = evidence(Mesh(pp=2), held, logs=logs, stored=stored(1), ever_stored=True)
    choice = choose(given)
    assert isinstance(choice, Choice)
    assert choice.origin == FromStorage(stored=stored(1))
    assert choice.lost == K - 1
