"""The digest of a state is one number, however the state is cut."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from elastic_train.geometry.box import Box
from elastic_train.geometry.digest import MASK, box_digest, combine, of_boxes
from elastic_train.geometry.fragments import Fragments
from elastic_train.planner.plan import Mesh
from elastic_train.testing.gloo_pool import GlooPool, PerRank
from elastic_train.train.collectives.process_group import Group
from elastic_train.train.state.tensor_digest import device_digest, reduced_digest, tensor_digest

pytestmark = pytest.mark.ring2

SHAPE = (7, 5, 6)
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def example(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(shape, generator=generator).mul(3).to(dtype)


def digest(tensor: torch.Tensor, box: Box, shape: tuple[int, ...] = SHAPE, name: str = "w") -> int:
    return tensor_digest(tensor[box.slices], tensor=name, state="param", box=box, shape=shape)


def cuts(size: int) -> list[list[tuple[int, int]]]:
    """Ways to cut one dim, as (offset, size)."""
    return [[(0, size)], [(0, 2), (2, size - 2)], [(0, 0), (0, 3), (3, 1), (4, size - 4)]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_to_cut_a_tensor_gives_the_digest_of_the_whole(dtype: torch.dtype) -> None:
    tensor = example(dtype)
    whole = digest(tensor, Box.whole(SHAPE))
    for parts in itertools.product(*(cuts(size) for size in SHAPE)):
        boxes = [Box(*zip(*part, strict=True)) for part in itertools.product(*parts)]
        assert combine(digest(tensor, box) for box in boxes) == whole


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_and_numpy_agree_on_every_dtype(dtype: torch.dtype) -> None:
    tensor = example(dtype)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for box in (Box.whole(SHAPE), Box((2, 0, 1), (3, 5, 4)), Box((0, 1, 0), (7, 2, 6))):
        bits = tensor[box.slices].contiguous().view(integers[tensor.element_size()])
        names = {"tensor": "w", "state": "param", "box": box, "shape": SHAPE}
        assert (
            int(device_digest(bits, **names)) & MASK
            == box_digest(bits.numpy(), **names)
            == digest(tensor, box)
        )


def test_bytes_from_a_file_give_the_digest_of_the_tensor() -> None:
    tensor = example(torch.bfloat16)
    boxes = [Box((0, 0, 0), (4, 5, 6)), Box((4, 0, 0), (3, 5, 2)), Box((4, 0, 2), (3, 5, 4))]
    rows = Fragments.of(("w", "param", "bfloat16", SHAPE, box) for box in boxes)
    data = [tensor[box.slices].contiguous().view(torch.uint8).numpy().reshape(-1) for box in boxes]
    assert of_boxes(rows, data) == digest(tensor, Box.whole(SHAPE))


def test_the_digest_of_a_known_array_never_changes_between_versions() -> None:
    array = np.arange(10, dtype=np.float32)
    names = {"tensor": "layers.0.weight", "state": "exp_avg", "box": Box.whole((10,)), "shape": (10,)}
    assert box_digest(array, **names) == 10924276501901858940


def test_a_long_run_and_a_tall_stack_of_short_runs_are_cut_into_blocks_alike() -> None:
    for shape in ((3, 40_000), (40_000, 3)):
        tensor = example(shape=shape)
        whole = digest(tensor, Box.whole(shape), shape)
        halves = [Box((0, 0), (shape[0], 2)), Box((0, 2), (shape[0], shape[1] - 2))]
        assert combine(digest(tensor, box, shape) for box in halves) == whole


def test_altered_moved_swapped_and_renamed_elements_change_the_digest() -> None:
    tensor = example()
    whole = Box.whole(SHAPE)
    seen = {digest(tensor, whole), digest(tensor, whole, name="v")}
    flipped = tensor.clone()
    flipped.view(torch.int32)[3, 2, 1] ^= 1
    swapped = tensor.clone()
    swapped[0], swapped[1] = tensor[1], tensor[0]
    seen |= {digest(flipped, whole), digest(swapped, whole), digest(tensor.flip(2), whole)}
    assert len(seen) == 5
    assert digest(torch.zeros(2), Box.whole((2,)), (2,)) != digest(torch.zeros(3), Box.whole((3,)), (3,))


def test_a_scalar_has_a_digest() -> None:
    one, two = (digest(torch.tensor(value), Box((), ()), ()) for value in (1.0, 2.0))
    assert one != two


def sharded(
    state: dict[str, Any], store: tuple[str, int], generation: int, rank: int, size: int
) -> list[int]:
    """The digest of one tensor under several placements over the ranks."""
    group = Group(
        generation=generation,
        rank=rank,
        world_size=size,
        store_host=store[0],
        store_port=store[1],
        address="127.0.0.1",
    )
    group.form()
    mesh = group.mesh(Mesh(dp_shard=size))["dp_shard"]
    found: list[int] = []
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        shard: DTensor = distribute_tensor(example(), mesh, [placement])
        sizes, offsets = compute_local_shape_and_global_offset(SHAPE, mesh, [placement])
        box = Box(tuple(offsets), tuple(sizes))
        own = tensor_digest(shard.to_local(), tensor="w", state="param", box=box, shape=SHAPE)
        counted = placement != Replicate() or rank == 0
        found.append(reduced_digest(own if counted else 0))
    group.destroy()
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_layout_over_ranks_gives_the_same_digest(pool: GlooPool, size: int) -> None:
    store, ranks = (pool.store_host, pool.store_port), range(size)
    found = pool.run(sharded, store, next(pool.generations), PerRank(ranks), size, ranks=ranks)
    assert found == [[digest(example(), Box.whole(SHAPE))] * 4] * size
