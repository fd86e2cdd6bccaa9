"""A run that moves between plans is the run that never moved."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from elastic_train.config import RunSpec
from elastic_train.testing.gang import From, Gang
from elastic_train.testing.gloo_pool import GlooPool
from tests.tasks.tiny import TinyTask, tiny_run
from tests.train.group_calls import count_resources

pytestmark = pytest.mark.ring2


def spec(max_steps: int, precision: str = "fp64") -> RunSpec:
    return tiny_run(max_steps=max_steps, precision=precision, clip_norm=2.0)


def test_a_run_that_shrinks_and_grows_keeps_its_losses(pool: GlooPool) -> None:
    gang = Gang(pool, TinyTask(), spec(15))
    gang.form(gang.plan(1, 1))
    expected, state = [r.loss for r in gang.run()], gang.whole()

    gang.form(gang.plan(1, 3), [0, 1, 2])
    losses = [r.loss for r in gang.pause_at(3)]
    moves = [((2, 1), [2, 0]), ((2, 2), [0, 1, 2, 3]), ((1, 1), [3]), ((1, 3), [2, 3, 0])]
    for number, (mesh, processes) in enumerate(moves, start=2):
        gang.form(gang.plan(*mesh), processes, gang.held())
        reports = gang.run() if number == 5 else gang.pause_at(3 * number)
        assert [r.step for r in reports] == list(range(3 * number - 2, 3 * number + 1))
        losses += [r.loss for r in reports]

    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    final = gang.whole()
    assert final.keys() == state.keys()
    for name in state:
        np.testing.assert_allclose(final[name], state[name], rtol=1e-9, atol=1e-12, err_msg=str(name))


def test_ranks_that_are_filled_while_the_others_run_the_first_step_end_as_if_nothing_had_moved(
    pool: GlooPool,
) -> None:
    gang = Gang(pool, TinyTask(), spec(9))
    gang.form(gang.plan(1, 1))
    expected, state = [r.loss for r in gang.run()], gang.whole()

    gang.form(gang.plan(2, 1), [0, 1])
    losses = [r.loss for r in gang.pause_at(4)]
    losses += [
        r.loss for r in gang.run_while_filling(gang.plan(4, 1), [1, 0, 2, 3], gang.held(), frozenset({2, 3}))
    ]

    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    final = gang.whole()
    for name in state:
        np.testing.assert_allclose(final[name], state[name], rtol=1e-9, atol=1e-12, err_msg=str(name))


def test_a_move_to_the_same_plan_changes_no_bit(pool: GlooPool) -> None:
    gang = Gang(pool, TinyTask(), spec(6, "fp32"))
    gang.form(gang.plan(1, 2))
    expected = [r.loss for r in gang.run()]
    gang.form(gang.plan(1, 2), [0, 1])
    losses = [r.loss for r in gang.pause_at(3)]
    gang.form(gang.plan(1, 2), [2, 3], gang.held())  # other processes, the same ranks
    assert losses + [r.loss for r in gang.run()] == expected


def test_the_digest_is_the_same_under_every_plan(pool: GlooPool) -> None:
    gang = Gang(pool, TinyTask(), spec(4))
    gang.form(gang.plan(3, 1))
    gang.pause_at(2)
    at = gang.held()
    digests = {gang.form(gang.plan(*mesh), None, at) for mesh in [(1, 1)]}
    at = gang.held()
    for mesh in [(1, 3), (2, 2)]:
        digests.add(gang.form(gang.plan(*mesh), None, at))
        at = gang.held()
    assert len(digests) == 1


def tensor_bytes(state: dict) -> int:
    """Of all tensors of this process, which collects nothing by itself."""
    gc.disable()
    state["undo"] = gc.enable
    storages = [
        t.untyped_storage() for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


IN_BACKWARD = {"optimizer_in_backward": True, "clip_norm": None}


@pytest.mark.parametrize(("mesh", "settings"), [((1, 2), {}), ((2, 1), {}), ((2, 1), IN_BACKWARD)])
def test_after_a_move_nothing_is_kept_of_what_was_held_before(
    pool: GlooPool, mesh: tuple[int, int], settings: dict[str, Any]
) -> None:
    gang = Gang(pool, TinyTask(), replace(spec(13), **settings))
    pool.run(tensor_bytes)
    gang.form(gang.plan(*mesh))
    kept, threads = [], []
    for step in (2, 4, 6, 8, 10, 12):
        gang.pause_at(step)
        kept.append(pool.run(tensor_bytes, ranks=[0, 1]))
        threads.append(pool.run(count_resources, ranks=[0, 1]))
        gang.form(gang.plan(*mesh), None, gang.held())
    assert all(now <= 1.1 * then for now, then in zip(kept[-1], kept[0], strict=True)), kept
    if pool.device == "cpu":  # a device's queues are threads here, of a pool that fills
        assert all(now <= then for now, then in zip(threads[-1], threads[1], strict=True)), threads


def count_digested(state: dict) -> None:
    """Count the bytes that this process digests."""
    from elastic_train.train.state import fragment_index

    plain = fragment_index.tensor_digest

    def counted(view: torch.Tensor, **where: Any) -> int:
        state["digested"] += view.numel() * view.element_size()
        return plain(view, **where)

    state["digested"], fragment_index.tensor_digest = 0, counted
    state["undo"] = lambda: setattr(fragment_index, "tensor_digest", plain)


def digested(state: dict) -> int:
    count, state["digested"] = state["digested"], 0
    return count


def test_replicas_share_the_digest(pool: GlooPool) -> None:
    gang = Gang(pool, TinyTask(), spec(4))
    pool.run(count_digested)
    alone = gang.form(gang.plan(1, 1))
    (everything,) = pool.run(digested, ranks=[0])
    assert gang.form(gang.plan(4, 1)) == alone
    shares = pool.run(digested)
    assert sum(shares) == everything
    assert max(shares) < everything / 2


def test_what_is_held_stays_readable_while_a_generation_is_joined_and_given_up(pool: GlooPool) -> None:
    gang = Gang(pool, TinyTask(), spec(4))
    gang.form(gang.plan(1, 2))
    gang.pause_at(2)
    at, before = gang.held(), gang.whole()
    gang.join(gang.plan(1, 3), [0, 1, 2])  # never filled, never started
    held = [h for h in gang.local_states() if h.generation == at.generation]
    assert [h.step for h in held] == [2, 2]
    gang.form(gang.plan(2, 1), None, From(generation=at.generation, step=2, holders=at.holders))
    after = gang.whole()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_hyperparameters_come_from_the_code_and_scheduled_ones_from_the_state(pool: GlooPool) -> None:
    run = spec(8)
    gang = Gang(pool, TinyTask(settings={"lr": 3e-2, "weight_decay": 0.1}), run)
    gang.form(gang.plan(1, 1))
    rates = [r.rates for r in gang.run()]
    gang.form(gang.plan(1, 2))
    gang.pause_at(4)
    document = pool.run(document_of, gang.generation, ranks=[0])[0]
    changed = TinyTask(settings={"lr": 3e-2, "weight_decay": 0.2})
    notes, after = pool.run(resumed, changed, run, document, ranks=[0])[0]
    assert notes == [
        "optimizer group 0 weight_decay: the run used 0.1, the code says 0.2, which is used",
        "optimizer group 1 weight_decay: the run used 0.1, the code says 0.2, which is used",
    ]
    assert after == [(rate, decay) for rate, decay in zip(rates[4], (0.2, 0.2, 0.0), strict=True)]


def document_of(state: dict, generation: int) -> dict:
    return state["member"].document(generation)


def resumed(state: dict, task: TinyTask, run: RunSpec, document: dict) -> tuple[list[str], list[tuple]]:
    """The groups of an optimizer that took over a document, without its tensors."""
    import torch

    from elastic_train.planner.plan import Mesh, Plan, even_shares
    from elastic_train.train.assemble import assemble
    from elastic_train.train.state.scalar_state import restore
    from elastic_train.train.user_code_guard import UserCodeGuard

    shards = assemble(
        task,
        run,
        generation=0,
        rank=0,
        plan=Plan(mesh=Mesh(), workers=("w",), nodes=("n",), shares=even_shares(5, 1)),
        mesh=None,
        device=torch.device("cpu"),
        guard=UserCodeGuard(worker="w", node="n", rank=0, generation=0, broken=lambda: False),
    )
    states = {tuple(name): torch.zeros(()) for name in document["optimizer"]["states"]}
    notes = restore(shards, document, states)
    return notes, [(g["lr"], g["weight_decay"]) for g in shards.optimizer.param_groups]
