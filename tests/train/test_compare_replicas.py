"""A bit that flips in one rank's parameter is found by comparing replicas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from elastic_train.config import RunSpec
from elastic_train.testing.gang import From, Gang
from elastic_train.testing.gang_member import call
from elastic_train.testing.gloo_pool import GlooPool
from tests.tasks.tiny import TinyTask, tiny_run

pytestmark = pytest.mark.ring2


def spec() -> RunSpec:
    return tiny_run(max_steps=8, precision="fp32", compare_replicas=2)


def flip_a_bit_at(state: dict, at: int) -> None:
    """A low bit of one number, which nothing else would notice. An update may round the lowest away."""

    def fault(phase: str, step: int, micro: int) -> None:
        if (phase, step) == ("vote", at):
            parameter = state["member"].held.current.parameters["blocks.0.up.weight"]
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.detach().view(torch.int32).reshape(-1)[0] ^= 1 << 6

    state["faults"] = fault


@pytest.mark.parametrize(("mesh", "at"), [((3, 1), 1), pytest.param((2, 1), 1, marks=pytest.mark.matrix)])
def test_a_flipped_bit_is_found_and_its_rank_named_where_others_outvote_it(
    pool: GlooPool, mesh: tuple[int, int], at: int
) -> None:
    gang = Gang(pool, TinyTask(), spec())
    gang.form(gang.plan(*mesh))
    pool.run(flip_a_bit_at, 5, ranks=[at])
    outcomes = gang.begin().results(120)
    assert all(end is None and error.startswith("ReplicasDiffer") for end, error, _ in outcomes)
    said = outcomes[0][1]
    assert "silent corruption at step 6" in said
    assert "At step 4 they agreed." in said
    held = [len(found) for found in pool.run(call, "held.local_states", ranks=gang.processes)]
    if mesh[0] == 2:
        assert "w0 (rank 0, node w0) and w1 (rank 1, node w1) differ, and nothing tells" in said
        assert held == [0, 0]
        return
    assert "w1 (rank 1, node w1) holds other bits than its replicas" in said
    assert held == [1, 0, 1]
    gang.form(gang.plan(3, 1), None, From(generation=gang.generation, step=6, holders=(0, 2)))
    assert [r.step for r in gang.run()] == [7, 8]
    assert all(np.isfinite(value).all() for value in gang.whole().values()), "and replicas are equal"


def test_what_a_late_rank_was_given_is_compared_before_it_is_used(pool: GlooPool) -> None:
    """With the one who gave it, who is right; whatever was said of how often to compare."""
    gang = Gang(pool, TinyTask(), replace(spec(), compare_replicas=None))
    gang.form(gang.plan(1, 1))
    gang.pause_at(4)
    pool.run(flip_a_bit_at, 5, ranks=[1])
    with pytest.raises(AssertionError, match=r"w1 \(rank 1, node w1\) holds other bits than its replicas"):
        gang.run_while_filling(gang.plan(2, 1), [0, 1], gang.held(), frozenset({1}))
    held = pool.run(call, "held.local_states", ranks=gang.processes)
    assert [[state.step for state in found] for found in held] == [[5], []]
