"""What the ranks write of a checkpoint together is all of the state, once, in equal parts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from elastic_train.config import Checkpoints, RunSpec
from elastic_train.geometry.box import Box, tiles
from elastic_train.geometry.fragments import Fragments
from elastic_train.testing.gang import Gang
from elastic_train.testing.gang_member import call, take
from elastic_train.testing.gloo_pool import GlooPool, PoolError
from tests.tasks.tiny import TinyTask, tiny_run

pytestmark = pytest.mark.ring2


def spec() -> RunSpec:
    return tiny_run(12, checkpoints=Checkpoints(every=2))


def ask_for_save_at(state: dict, at: int) -> None:
    def fault(phase: str, step: int, micro_batch: int) -> None:
        if phase == "backward" and step == at:
            state["member"].request(save=True)

    state["faults"] = fault


@pytest.mark.parametrize("mesh", [(1, 1), (3, 1), (1, 3), (2, 2)])
def test_the_pieces_of_all_ranks_tile_every_tensor_and_weigh_the_same(
    pool: GlooPool, mesh: tuple[int, int]
) -> None:
    gang = Gang(pool, TinyTask(batch_norm=True), spec())
    gang.form(gang.plan(*mesh))
    pool.run(ask_for_save_at, 3, ranks=gang.processes[-1:])
    gang.run()
    whole = gang.whole()
    saved = pool.run(take, "saved", ranks=gang.processes)
    assert [[step for step, _, _ in own] for own in saved] == [[2, 3, 4, 5]] * len(saved)
    last = [own[-1][1] for own in saved]
    boxes: dict[tuple[str, str], list[Box]] = {}
    for pieces in last:
        for tensor, state, dtype, shape, box, data in pieces:
            boxes.setdefault((tensor, state), []).append(box)
            expected = whole[tensor, state]
            assert shape == expected.shape
            assert np.array_equal(np.frombuffer(data, dtype).reshape(box.sizes), expected[box.slices])
    assert boxes.keys() == whole.keys()
    for name, found in boxes.items():
        assert tiles(found, Box.whole(whole[name].shape)), name
    sizes = [sum(len(data) for *_, data in pieces) for pieces in last]
    shard = sum(sizes) / mesh[1]
    # Shards of the same mesh column are cut by torch; what is ours to balance are the replicas.
    for column in range(mesh[1]):
        replicas = sizes[column :: mesh[1]]
        assert max(replicas) - min(replicas) <= 0.1 * shard, sizes


def test_a_run_goes_on_from_its_pieces_and_document_alone(pool: GlooPool) -> None:
    gang = Gang(pool, TinyTask(batch_norm=True), spec())
    gang.form(gang.plan(1, 2))
    expected = [r.loss for r in gang.run()]
    saved = pool.run(take, "saved", ranks=gang.processes)
    step, _, document = saved[0][0]
    document = json.loads(json.dumps(document))
    pieces = [piece for own in saved for piece in own[0][1]]

    gang = Gang(pool, TinyTask(batch_norm=True), spec())  # new members that hold nothing
    gang.join(gang.plan(3, 1), [0, 1, 2])
    table = Fragments.of(
        {(t, s): (t, s, d, shape, Box.whole(shape)) for t, s, d, shape, _, _ in pieces}.values()
    )
    needs = pool.run(call, "forming.needs", table, ranks=gang.processes)
    stored = Fragments.of((t, s, d, shape, box) for t, s, d, shape, box, _ in pieces)
    assert set(needs[0].names) == set(stored.names)
    arrays = [np.frombuffer(data, np.uint8) for *_, data in pieces]
    pool.run(call, "forming.fill", stored, arrays, ranks=gang.processes)
    assert pool.run(call, "load", document, ranks=gang.processes) == [[], [], []]
    pool.run(call, "forming.digest", ranks=gang.processes)
    pool.run(call, "go", ranks=gang.processes)
    np.testing.assert_allclose([r.loss for r in gang.run()], expected[step:], rtol=1e-9)


def test_a_state_that_lacks_one_moment_is_refused_by_name(pool: GlooPool) -> None:
    gang = Gang(pool, TinyTask(), spec())
    gang.form(gang.plan(1, 1))
    gang.run()
    at = gang.held()
    held: Any = pool.run(call, "held.table", at.generation, ranks=[0])[0]
    document = pool.run(call, "document", at.generation, ranks=[0])[0]
    rows = [i for i in range(len(held)) if held.names[held.key[i]] != ("embed.weight", "exp_avg")]
    gang.join(gang.plan(1, 1), [0])
    names = [held.names[held.key[i]] for i in rows]
    pool.run(call, "forming.needs", names, ranks=[0])
    with pytest.raises(PoolError, match=r"'exp_avg' of 'embed\.weight' is listed and was not found"):
        pool.run(call, "load", document, ranks=[0])
