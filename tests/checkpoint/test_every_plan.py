"""What any plan of up to 6 workers saves is read under any other, bit for bit: boxes and bytes alone.

A plan cuts by `dp_shard` along dim 0 and by `tp` along the dim that each tensor says; `dp_replicate` ranks
share the writing. Stages of a pipeline hold whole tensors, so `pp` only says which rank has which.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.writer import write_part
from elastic_train.geometry.box import Box
from elastic_train.geometry.layout import Placement, Replicated, Sharded, StridedSharded, boxes
from elastic_train.storage.memory_store import MemoryStore

pytestmark = pytest.mark.ring1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A tensor: its dtype, shape, the dim that tensor parallelism cuts, and its pipeline stage's number."""

    dtype: str
    shape: tuple[int, ...]
    tp: int | None = None
    stage: int = 0


KINDS = {
    "uneven": Kind(dtype="float32", shape=(7, 5), tp=1),
    "rows of tp": Kind(dtype="float32", shape=(11, 3), tp=0, stage=1),
    "shorter than the group": Kind(dtype="float32", shape=(2, 3), tp=1, stage=2),
    "empty": Kind(dtype="float32", shape=(0, 4), tp=1),
    "0-dim": Kind(dtype="float32", shape=()),
    "bf16": Kind(dtype="bfloat16", shape=(9,), stage=1),
    "fp8": Kind(dtype="float8_e4m3fn", shape=(5, 6), tp=1),
    "bool": Kind(dtype="bool", shape=(6, 2), stage=2),
    "int": Kind(dtype="int64", shape=(13,)),
    "complex": Kind(dtype="complex64", shape=(4, 3), tp=0),
    "fused qkv": Kind(dtype="float32", shape=(24, 5), tp=0, stage=1),
    "stacked experts": Kind(dtype="float16", shape=(4, 6, 3), tp=2, stage=2),
}


@dataclass(frozen=True, slots=True, order=True)
class Plan:
    replicate: int
    shard: int
    tp: int
    pp: int

    @property
    def size(self) -> int:
        return self.replicate * self.shard * self.tp * self.pp

    def ranks(self) -> Iterator[tuple[int, int, int, int]]:
        yield from itertools.product(*map(range, (self.replicate, self.shard, self.tp, self.pp)))


PLANS = [Plan(*axes) for axes in itertools.product(range(1, 7), repeat=4) if Plan(*axes).size <= 6]
CUTS = [plan for plan in PLANS if plan.replicate == plan.pp == 1]
"""Plans that cut differently; the others hold the same boxes on more ranks."""


def own(plan: Plan, rank: tuple[int, int, int, int], kind: Kind) -> tuple[Box, ...]:
    """The boxes of a tensor that a rank holds, none if the tensor is of another stage."""
    _, shard, tp, stage = rank
    if stage != kind.stage % plan.pp:
        return ()
    if not kind.shape:
        return (Box((), ()),)
    along: Placement = Replicated() if kind.tp is None or plan.tp == 1 else Sharded(kind.tp)
    first: Placement = Sharded(0)
    if kind.tp == 0 and plan.tp > 1:  # tensor parallelism cuts first, then FSDP what is left of it
        first = StridedSharded(0, split_factor=plan.tp)
    return boxes(kind.shape, (plan.shard, plan.tp), (shard, tp), (first, along))


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    found = {}
    for name, kind in KINDS.items():
        numpy = ELEMENTS[kind.dtype].numpy
        high = 2 if kind.dtype == "bool" else 256
        raw = rng.integers(0, high, int(np.prod(kind.shape)) * numpy.itemsize, dtype=np.uint8)
        found[name] = raw.view(numpy).reshape(kind.shape)
    return found


ARRAYS = arrays()


def holders(plan: Plan, kind: Kind) -> dict[Box, list[int]]:
    """The ranks that hold each box of a tensor."""
    found: dict[Box, list[int]] = {}
    for number, rank in enumerate(plan.ranks()):
        for box in own(plan, rank, kind):
            found.setdefault(box, []).append(number)
    return found or {Box.whole(kind.shape): [0]}  # an empty tensor is nobody's shard and still there


def saved(plan: Plan) -> Checkpoint:
    """A checkpoint written under a plan: of the ranks that hold a box, another one writes it each time."""
    pieces: list[list[Piece]] = [[] for _ in range(plan.size)]
    for turn, (name, kind) in enumerate(KINDS.items()):
        for box, ranks in holders(plan, kind).items():
            data = ARRAYS[name][(*box.slices, ...)]
            pieces[ranks[turn % len(ranks)]].append(
                Piece(tensor=name, state="param", dtype=kind.dtype, shape=kind.shape, box=box, data=data)
            )
    store = MemoryStore()
    parts = [write_part(store, "c", number, own) for number, own in enumerate(pieces)]
    assemble(store, "c", parts, {"step": 1}, aliases={"tied": "uneven"})
    return Checkpoint.open(store, "c")


def check(checkpoint: Checkpoint, plan: Plan) -> None:
    """Every box that a rank of the plan holds has the bits that were saved."""
    wanted = [(name, box) for name, kind in KINDS.items() for box in holders(plan, kind)]
    wanted += [("tied", box) for box in holders(plan, KINDS["uneven"])]
    got = checkpoint.read_many([(name, "param", box) for name, box in wanted])
    for (name, box), back in zip(wanted, got, strict=True):
        array = ARRAYS["uneven" if name == "tied" else name]
        assert back.dtype == array.dtype
        assert back.tobytes() == array[(*box.slices, ...)].tobytes(), (plan, name, box)


@pytest.mark.parametrize("source", PLANS, ids=str)
def test_any_plan_is_read_by_every_cut(source: Plan) -> None:
    checkpoint = saved(source)
    for target in CUTS:
        check(checkpoint, target)


@pytest.mark.matrix
@pytest.mark.parametrize("source", PLANS, ids=str)
def test_any_plan_is_read_by_any_plan(source: Plan) -> None:
    checkpoint = saved(source)
    for target in PLANS:
        check(checkpoint, target)
