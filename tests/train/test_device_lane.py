"""What a device sends into a slot, here with the host in the device's place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from elastic_train.checkpoint.engine.arena import Arena, slot_bytes
from elastic_train.checkpoint.engine.copying import BLOCK, Copying
from elastic_train.geometry.box import Box
from elastic_train.train.snapshot.device_lane import DeviceLane
from elastic_train.train.snapshot.tensor_sources import TensorSource
from elastic_train.train.state.live_fragments import DTYPE_NAMES, Replica, TensorPart

pytestmark = pytest.mark.ring1
CPU = torch.device("cpu")


def source(name: str, value: torch.Tensor, state: str = "param") -> TensorSource:
    shape = tuple(value.shape)
    return TensorSource(
        TensorPart(
            tensor=name,
            state=state,
            dtype=DTYPE_NAMES[value.dtype],
            shape=shape,
            box=Box.whole(shape),
            view=value,
            replica=Replica(),
        )
    )


class Counting:
    """A side stream that counts how often it is entered; everything is done at once."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def follow(self) -> None:
        self.words.append("follow")

    @contextmanager
    def entered(self) -> Iterator[None]:
        self.words.append("copy")
        yield

    def order(self) -> None:
        self.words.append("order")

    def wait(self) -> None:
        self.words.append("wait")

    def uses(self, tensor: torch.Tensor) -> None:
        return None


def state() -> list[TensorSource]:
    torch.manual_seed(0)
    wide = torch.randn(700, 9000)
    return [
        source("scalar", torch.tensor(3.5)),
        source("half", torch.randn(37).bfloat16()),
        source("mask", torch.rand(13) > 0.5),
        source("large", torch.randn(BLOCK // 4 + 11)),
        source("turned", wide.t()),
        source("rows", wide[3:5]),
        source("columns", wide[:, 7:4000]),
        source("one row", wide[5:6, ::3]),
        source("mean", torch.randn(64), "buffer"),
        source("nothing", torch.empty(0, 4)),
        *(source(f"norm.{i}", torch.randn(128)) for i in range(50)),
    ]


def test_every_tensor_arrives_bit_by_bit_whatever_its_type_and_strides() -> None:
    held, side = state(), Counting()
    arena = Arena.private(slot_bytes(s.nbytes for s in held), slots=1)
    lane = DeviceLane(CPU, arena, side)
    copying = Copying(held, arena.slot(0), range(len(held)), lane=lane)
    copying.copy_unsettled()
    copying.land()
    for found, place in zip(held, copying.places, strict=True):
        expected = found.part.view.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert bytes(arena.slot(0)[place.offset : place.offset + place.nbytes]) == expected, place.key
    assert copying.error is None
    assert copying.changed() == ()
    lane.close()
    assert side.words[:2] == ["copy", "order"], "the buffer goes first, and the forward comes behind it"
    blocks = sum(-(-s.nbytes // BLOCK) for s in held if s.nbytes > BLOCK)
    assert side.words.count("copy") <= blocks + 8, "small tensors are not sent one by one"


def test_a_tensor_that_is_not_contiguous_is_never_copied_as_a_whole() -> None:
    turned = source("turned", torch.randn(500, 40_000).t())
    target = memoryview(bytearray(BLOCK))
    for start in range(0, turned.nbytes, BLOCK):
        stop = min(start + BLOCK, turned.nbytes)
        found = turned.bytes_between(start, stop)
        assert found.untyped_storage().nbytes() <= BLOCK + 2 * turned.nbytes // 40_000
        turned.copy(start, stop, target[: stop - start])


def test_without_a_driver_nothing_is_pinned_and_that_can_be_told() -> None:
    lane = DeviceLane(CPU, Arena.private(4096, slots=2))
    assert not lane.pinned
    lane.close()
