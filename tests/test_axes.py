"""The table of parallel axes, and what has a field for each of them."""

from __future__ import annotations

from dataclasses import fields

import pytest

from elastic_train.axes import AXES, BATCH, MODEL, RANKED
from elastic_train.config import Parallelism
from elastic_train.planner.limits import AxisLimits
from elastic_train.planner.mesh_candidates import Candidates
from elastic_train.planner.plan import Mesh

pytestmark = pytest.mark.ring0


@pytest.mark.parametrize(
    ("kind", "axes"), [(Mesh, AXES), (Parallelism, AXES), (Candidates, AXES), (AxisLimits, MODEL)]
)
def test_every_axis_is_a_field(kind: type, axes: tuple[str, ...]) -> None:
    assert set(axes) <= {field.name for field in fields(kind)}


def test_ranks_are_counted_along_the_table() -> None:
    mesh = Mesh(**dict(zip(RANKED, (2, 3, 4, 5, 6), strict=True)))
    rank = 0
    for axis in RANKED:
        rank = rank * getattr(mesh, axis) + 1
    assert mesh.coordinate(rank) == dict.fromkeys(reversed(RANKED), 1)
    assert mesh.size == 2 * 3 * 4 * 5 * 6


def test_copies_and_blocks_are_counted_along_the_table() -> None:
    mesh = Mesh(**dict(zip(RANKED, (2, 3, 4, 5, 6), strict=True)), ep=2)
    at = [mesh.coordinate(rank) for rank in range(mesh.size)]

    def alike(*axes: str) -> int:
        """Ranks that are at the beginning of these axes."""
        return sum(all(place[axis] == 0 for axis in axes) for place in at)

    assert mesh.dp == alike(*(axis for axis in RANKED if axis not in BATCH)) == 3 * 4
    assert mesh.copy_size == alike("pp", "dp_replicate")
    assert mesh.block_size == alike("pp", *BATCH)
