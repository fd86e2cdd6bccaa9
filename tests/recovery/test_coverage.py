from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.planner.plan import Mesh
from elastic_train.recovery.rank_coverage import missing, part, parts

pytestmark = pytest.mark.ring0

MESHES = st.builds(
    Mesh,
    pp=st.integers(1, 3),
    dp_replicate=st.integers(1, 3),
    dp_shard=st.integers(1, 3),
    cp=st.integers(1, 2),
    tp=st.integers(1, 2),
)


@settings(deadline=None)
@given(mesh=MESHES)
def test_ranks_that_differ_only_in_their_copy_hold_the_same_part(mesh):
    alike = {"dp_replicate"} if mesh.dp_shard > 1 else {"dp_replicate", "cp"}

    def coordinate(rank: int) -> tuple[tuple[str, int], ...]:
        return tuple(sorted((axis, at) for axis, at in mesh.coordinate(rank).items() if axis not in alike))

    by_part = {part(mesh, rank): coordinate(rank) for rank in range(mesh.size)}
    assert all(by_part[part(mesh, rank)] == coordinate(rank) for rank in range(mesh.size))
    assert len(set(by_part.values())) == len(by_part) == mesh.size // mesh.copies
    copies = {(part(mesh, rank), mesh.copy_index(rank)) for rank in range(mesh.size)}
    assert copies == {(at, copy) for at in by_part for copy in range(mesh.copies)}


@settings(deadline=None)
@given(mesh=MESHES, data=st.data())
def test_the_missing_ranks_complete_the_state(mesh, data):
    ranks = data.draw(st.sets(st.integers(0, mesh.size - 1)))
    gone = missing(mesh, ranks)
    assert {part(mesh, rank) for rank in ranks | set(gone)} == set(parts(mesh))
    assert not {part(mesh, rank) for rank in ranks} & {part(mesh, rank) for rank in gone}
    assert missing(mesh, ranks | set(gone)) == ()


def test_one_whole_replica_is_enough():
    mesh = Mesh(pp=2, dp_replicate=2, dp_shard=2)
    assert missing(mesh, {0, 3, 4, 5}) == ()
    assert missing(mesh, {0, 2, 4, 5}) == (1,)


def test_a_rank_with_other_positions_has_the_same_copy_unless_both_are_sharded():
    assert missing(Mesh(pp=2, cp=2), {0, 3}) == ()
    assert missing(Mesh(dp_shard=2, cp=2), {0, 3}) == (1, 2)


def test_a_lost_stage_is_missing_whatever_its_neighbours_hold():
    mesh = Mesh(pp=2, dp_shard=2)
    assert missing(mesh, {0, 1}) == (2, 3)
