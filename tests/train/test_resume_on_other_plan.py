"""What is saved under one plan goes on under another as if nothing had happened: pairs of live groups.

Thirty pairs always; `make faults` has all of them. The state is compared to the bit, the next losses to 1e-9.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.writer import write_part
from elastic_train.cluster.worker.restore_shards import restore
from elastic_train.config import Batch, Checkpoints, RunSpec
from elastic_train.storage.fsspec_store import open_store
from elastic_train.testing.gang import Gang
from elastic_train.testing.gang_member import take
from elastic_train.testing.gloo_pool import GlooPool
from tests.tasks.tiny import TinyTask

pytestmark = pytest.mark.ring2

Mesh = tuple[int, int]
MESHES: tuple[Mesh, ...] = ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1))
SOURCES: tuple[Mesh, ...] = ((1, 1), (1, 2), (2, 1), (1, 3), (2, 2))
TARGETS: tuple[Mesh, ...] = ((1, 1), (1, 2), (3, 1), (1, 3), (1, 4), (2, 2))
SAVED, LAST = 2, 4


def spec() -> RunSpec:
    return RunSpec(
        name="pairs",
        storage_path="/nowhere",
        batch=Batch(global_size=12, micro_size=3, seed=5),
        max_steps=LAST,
        min_workers=1,
        max_workers=4,
        precision="fp64",
        checkpoints=Checkpoints(every=SAVED),
    )


def restored(state: dict[str, Any], url: str) -> tuple[int, tuple[str, ...]]:
    run = RunDirectory(open_store(url))
    newest = run.newest()
    assert newest is not None
    filled = restore(state["member"], Checkpoint.of(run, newest))
    state["member"].go()
    return filled.digest, filled.notes


def saved(gang: Gang, mesh: Mesh, url: str) -> list[float]:
    """Train, with a checkpoint after step SAVED; the losses of the steps after it."""
    gang.form(gang.plan(*mesh))
    losses = [report.loss for report in gang.run()]
    commit(gang, url, SAVED)
    return losses[SAVED:]


def commit(gang: Gang, url: str, at: int) -> None:
    """Write and commit the first state that the members gave to be saved, which is that of a step."""
    run = RunDirectory(open_store(url))
    term = run.begin_term("test")
    directory = attempt_path(step=at, generation=1)
    parts, document = [], {}
    for rank, shares in enumerate(gang.pool.run(take, "saved", ranks=gang.processes)):
        step, pieces, document = shares[0]
        assert step == at
        own = [
            Piece(tensor=t, state=s, dtype=dtype, shape=shape, box=box, data=data)
            for t, s, dtype, shape, box, data in pieces
        ]
        parts.append(write_part(run.store, directory, rank, own))
    assembled = assemble(run.store, directory, parts, document, aliases=document["aliases"])
    run.commit(assembled, term=term, generation=1, step=at, lineage=[(1, 0)])


def check(gang: Gang, mesh: Mesh, url: str, expected: list[float]) -> int:
    """Go on under another plan; the digest of the state that was read."""
    plan = gang.plan(*mesh)
    gang.join(plan, range(plan.world_size))
    found = set(gang.pool.run(restored, url, ranks=gang.processes))
    assert len(found) == 1
    digest, notes = found.pop()
    assert notes == ()
    np.testing.assert_allclose([report.loss for report in gang.run()], expected, rtol=1e-9)
    return digest


def pairs(pool: GlooPool, source: Mesh, targets: tuple[Mesh, ...], url: str) -> None:
    gang = Gang(pool, TinyTask(batch_norm=True), spec())
    expected = saved(gang, source, url)
    digests = {mesh: check(gang, mesh, url, expected) for mesh in targets}
    assert len(set(digests.values())) == 1, digests


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_six_plans_go_on_from_what_one_saved(pool: GlooPool, tmp_path: Path, source: Mesh) -> None:
    pairs(pool, source, TARGETS, str(tmp_path))


@pytest.mark.matrix
@pytest.mark.parametrize("source", MESHES, ids=str)
def test_every_plan_goes_on_from_what_any_saved(pool: GlooPool, tmp_path: Path, source: Mesh) -> None:
    pairs(pool, source, MESHES, str(tmp_path))
