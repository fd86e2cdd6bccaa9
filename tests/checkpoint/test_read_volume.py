"""What a plan says would be read is what reading it reads, whatever the fragments and the boxes."""

from __future__ import annotations

import itertools
import random

import pytest

from elastic_train.checkpoint.checksums import page_bytes
from elastic_train.checkpoint.manifest import Manifest, Row
from elastic_train.checkpoint.ranges import RangeIndex, Request
from elastic_train.checkpoint.read_volume import ReadVolume
from elastic_train.geometry.box import Box

pytestmark = pytest.mark.ring0


def rows_of(chance: random.Random) -> tuple[list[Row], dict[str, tuple[int, int]]]:
    """Tensors cut along dim 0, in two files, with gaps; some rows without checksums."""
    rows: list[Row] = []
    shapes: dict[str, tuple[int, int]] = {}
    at = 0
    for number in range(chance.randrange(1, 5)):
        tensor = f"t{number}"
        tall, wide = shapes[tensor] = chance.choice([1, 7, 64, 100]), chance.choice([1, 3, 1000, 70_000])
        cuts = sorted({0, tall, *(chance.randrange(tall + 1) for _ in range(chance.choice([0, 2, 50])))})
        for low, high in itertools.pairwise(cuts):
            size = (high - low) * wide * 4
            pages = -(-size // page_bytes(size))
            rows.append(
                Row(
                    tensor=tensor, state="param", dtype="float32", shape=(tall, wide),
                    box=Box((low, 0), (high - low, wide)), file=chance.choice("xy"), byte_offset=at,
                    checksums=(0,) * pages if chance.random() < 0.8 else None,
                )
            )  # fmt: skip
            at += size + chance.choice([0, 0, 100, 9000])
    return rows, shapes


def boxes_of(chance: random.Random, shapes: dict[str, tuple[int, int]]) -> list[Request]:
    found: list[Request] = []
    for _ in range(chance.randrange(6)):
        tensor = chance.choice(list(shapes))
        tall, wide = shapes[tensor]
        top = chance.randrange(tall)
        bottom = chance.randrange(top, tall + 1)
        left = chance.randrange(wide) if chance.random() < 0.3 else 0
        right = chance.randrange(left, wide + 1) if chance.random() < 0.3 else wide
        found.append((tensor, "param", Box((top, left), (bottom - top, right - left))))
    return found


@pytest.mark.parametrize("seed", range(30))
def test_the_volume_of_reads_is_that_of_the_reads(seed: int) -> None:
    chance = random.Random(seed)
    rows, shapes = rows_of(chance)
    index = RangeIndex(Manifest.of(rows), url="x")
    requests = boxes_of(chance, shapes)
    reads = index.reads(requests)
    assert ReadVolume(index).of(requests) == (sum(r.length for r in reads), len(reads))
