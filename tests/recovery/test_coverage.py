from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.planner.plan import Mesh
from elastic_train.recovery.coverage import covers, missing, part

pytestmark = pytest.mark.ring0

MESHES = st.builds(
    Mesh,
    pp=st.integers(1, 3),
    dp_replicate=st.integers(1, 3),
    dp_shard=st.integers(1, 3),
    cp=st.integers(1, 2),
    tp=st.integers(1, 2),
)


@given(mesh=MESHES)
def test_ranks_that_differ_only_in_their_replica_hold_the_same_part(mesh):
    def coordinate(rank: int) -> tuple[tuple[str, int], ...]:
        return tuple(
            sorted((axis, at) for axis, at in mesh.coordinate(rank).items() if axis != "dp_replicate")
        )

    by_part = {part(mesh, rank): coordinate(rank) for rank in range(mesh.size)}
    assert all(by_part[part(mesh, rank)] == coordinate(rank) for rank in range(mesh.size))
    assert len(set(by_part.values())) == len(by_part) == mesh.size // mesh.dp_replicate


@given(mesh=MESHES, data=st.data())
def test_ranks_cover_the_state_exactly_when_no_part_is_missing(mesh, data):
    ranks = data.draw(st.sets(st.integers(0, mesh.size - 1)))
    gone = missing(mesh, ranks)
    assert covers(mesh, ranks) is (gone == ())
    assert covers(mesh, ranks | set(gone))


def test_one_whole_replica_is_enough():
    mesh = Mesh(pp=2, dp_replicate=2, dp_shard=2)
    assert covers(mesh, {0, 3, 4, 5})
    assert missing(mesh, {0, 2, 4, 5}) == (1,)


def test_a_lost_stage_is_missing_whatever_its_neighbours_hold():
    mesh = Mesh(pp=2, dp_shard=2)
    assert missing(mesh, {0, 1}) == (2, 3)
