"""Live tensors as fragments: which boxes of which logical tensors a rank holds, and views of their memory.

Works from the placements of a DTensor alone, whatever the mesh. A tensor without placements is whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from elastic_train.axes import AXES, RANKED
from elastic_train.geometry.box import Box
from elastic_train.geometry.fragments import ITEM_BYTES, Fragments
from elastic_train.geometry.fused import Run, logical_boxes
from elastic_train.geometry.layout import Placement, Replicated, Sharded, StridedSharded, boxes
from elastic_train.train.collectives.gradient_reduction import CONTEXT_SHARD
from elastic_train.train.collectives.mesh_position import MeshPosition
from elastic_train.train.state.shards import Shards

DTYPE_NAMES = {getattr(torch, name): name for name in ITEM_BYTES}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Which of the ranks that hold the same boxes a rank is; `axes` are those along which they differ."""

    index: int = 0
    count: int = 1
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """One box of a logical tensor and the memory that holds it: `view` has the sizes of `box`."""

    tensor: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    view: torch.Tensor
    replica: Replica


def parts(
    shards: Shards, extra: Mapping[tuple[str, str], torch.Tensor] = MappingProxyType({})
) -> Iterator[TensorPart]:
    """Everything a rank holds of its step: parameters, buffers, and every tensor of the optimizer's state.

    `extra` are state tensors by (fqn, state) that the optimizer does not have yet; they replace its own.
    """
    for fqn, parameter in shards.parameters.items():
        if fqn in shards.absent:
            continue
        yield from _parts(fqn, "param", parameter.detach(), shards)
        for state, value in shards.optimizer.state.get(parameter, {}).items():
            if is_fragment(state, value, parameter) and (fqn, state) not in extra:
                yield from _parts(fqn, state, value, shards)
    for fqn, buffer in shards.buffers.items():
        if fqn not in shards.absent:
            yield from _parts(fqn, "buffer", buffer, shards)
    for (fqn, state), value in extra.items():
        yield from _parts(fqn, state, value, shards)


def gradient_parts(shards: Shards, fqn: str, gradient: torch.Tensor) -> Iterator[TensorPart]:
    """A gradient that is cut as its parameter is."""
    return _parts(fqn, "gradient", gradient, shards)


def table(held: Iterable[TensorPart]) -> Fragments:
    return Fragments.of((p.tensor, p.state, p.dtype, p.shape, p.box) for p in held)


def is_fragment(state: str, value: object, parameter: torch.Tensor) -> bool:
    """Whether an entry of the optimizer's state is stored as a tensor; scalars are in the document."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.ndim > 0 or (parameter.ndim == 0 and state != "step")


def is_empty(value: object) -> bool:
    """Whether it is a tensor without elements: nothing of it is stored but its shape."""
    return isinstance(value, torch.Tensor) and value.numel() == 0


def shard_like(
    parameter: nn.Parameter,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    zeros: bool = True,
) -> torch.Tensor:
    """Memory for a state tensor of a parameter: cut as the parameter if it has its shape, else whole.

    Without `zeros` its pages are not touched before they are filled, and never where they are not.
    """
    make = torch.zeros if zeros else torch.empty
    if not isinstance(parameter, DTensor):
        return make(shape, dtype=dtype, device=device)
    mesh = parameter.device_mesh
    if shape == tuple(parameter.shape):
        local = make(parameter.to_local().shape, dtype=dtype, device=device)
        placements: Sequence[object] = parameter.placements
    else:
        local, placements = make(shape, dtype=dtype, device=device), [Replicate()] * mesh.ndim
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def replica_of(fqn: str, value: torch.Tensor, place: MeshPosition) -> Replica:
    """Which of the ranks that hold the same boxes of a tensor this one is."""
    cut: set[str] = set()
    if isinstance(value, DTensor):
        names = value.device_mesh.mesh_dim_names
        assert names is not None
        cut = {n for n, p in zip(names, value.placements, strict=True) if not isinstance(p, Replicate)}
        cut |= {AXES[n].part_of for n in cut if n in AXES}  # with expert_shard, a part is the whole axis
        cut |= {"dp_shard", "cp"} if CONTEXT_SHARD in cut else set()
    stages = place.stages_of(fqn)
    sizes = [(str(stages), len(stages), stages.index(place.stage))] if len(stages) > 1 else []
    at = place.mesh.coordinate(place.rank)
    sizes += [
        (axis, getattr(place.mesh, axis), at[axis])
        for axis in RANKED
        if AXES[axis].divides != "stages" and axis not in cut and getattr(place.mesh, axis) > 1
    ]
    index = 0
    for _, size, own in sizes:
        index = index * size + own
    return Replica(
        index=index,
        count=math.prod(size for _, size, _ in sizes),
        axes=tuple(axis for axis, _, _ in sizes),
    )


def cut_into(whole: torch.Tensor, shard: torch.Tensor) -> None:
    """Copy from a whole tensor what belongs into a shard of it."""
    for box, view in _boxes(shard):
        view.copy_(whole[box.slices])


def numpy_bits(view: torch.Tensor) -> np.ndarray:
    """A CPU tensor's memory as integers of its item size, for dtypes that numpy lacks too. No copy."""
    return view.detach().view(_BITS[view.element_size()]).numpy()


def read_box(part: TensorPart, box: Box) -> np.ndarray:
    """The bytes of a box inside a part, uint8, row-major; a view of live memory where that is contiguous."""
    inner = part.view[box.within(part.box).slices].detach().cpu().contiguous()
    return numpy_bits(inner).reshape(-1).view(np.uint8)


def memory_of_box(part: TensorPart, box: Box) -> np.ndarray | None:
    """The live memory of a box inside a part, uint8; None where it isn't contiguous, or not the host's."""
    inner = part.view[box.within(part.box).slices]
    if inner.device.type != "cpu" or not inner.is_contiguous():
        return None
    return numpy_bits(inner).reshape(-1).view(np.uint8)


def write_box(part: TensorPart, box: Box, data: np.ndarray) -> None:
    """Copy row-major bytes into a box inside a part."""
    target = part.view[box.within(part.box).slices]
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    if target.device.type == "cpu":
        bits = numpy_bits(target)
        bits[...] = raw.view(bits.dtype).reshape(target.shape)
    else:
        host = torch.empty(target.shape, dtype=target.dtype)
        bits = numpy_bits(host)
        bits[...] = raw.view(bits.dtype).reshape(target.shape)
        target.copy_(host)


def own_share(held: Sequence[TensorPart]) -> Iterator[TensorPart]:
    """What this rank writes of a checkpoint: of all that its replicas hold too, an equal part of the bytes.

    Boxes that the same ranks hold are laid end to end and cut into as many ranges, at rows.
    """
    by_replica: dict[Replica, list[TensorPart]] = {}
    for part in held:
        by_replica.setdefault(part.replica, []).append(part)
    for replica, group in by_replica.items():
        total = sum(p.view.numel() * p.view.element_size() for p in group)
        low, high = (total * at // replica.count for at in (replica.index, replica.index + 1))
        start = 0
        for part in group:
            size = part.view.numel() * part.view.element_size()
            yield from _rows(part, low - start, high - start, size)
            start += size


def _rows(part: TensorPart, low: int, high: int, size: int) -> Iterator[TensorPart]:
    """The rows of a part whose first byte is in low .. high - 1."""
    count = part.box.sizes[0] if part.box.sizes else 1
    row = size // count
    first, stop = (min(max(-(-at // row), 0), count) for at in (low, high))
    if first >= stop:
        return
    if not part.box.sizes or stop - first == count:
        yield part
        return
    box = Box((part.box.offsets[0] + first, *part.box.offsets[1:]), (stop - first, *part.box.sizes[1:]))
    yield TensorPart(
        tensor=part.tensor,
        state=part.state,
        dtype=part.dtype,
        shape=part.shape,
        box=box,
        view=part.view[first:stop],
        replica=part.replica,
    )


def _parts(fqn: str, state: str, value: torch.Tensor, shards: Shards) -> Iterator[TensorPart]:
    replica = replica_of(fqn, value, shards.place)
    runs = shards.whole.fused.get(fqn) if tuple(value.shape) == tuple(shards.whole.shapes[fqn]) else None
    for box, view in cut_of(value, runs):
        yield TensorPart(
            tensor=fqn,
            state=state,
            dtype=DTYPE_NAMES[value.dtype],
            shape=tuple(value.shape),
            box=box,
            view=view,
            replica=replica,
        )


def cut_of(value: torch.Tensor, runs: Sequence[Run] | None) -> Iterator[tuple[Box, torch.Tensor]]:
    """The logical boxes of a tensor that are here, with views; `runs` if its rows are in rank order."""
    for held, view in _boxes(value):
        if runs is None:
            yield held, view
        else:
            for box, row in logical_boxes(held, runs):
                yield box, view[row : row + box.sizes[0]]


def _boxes(value: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """The non-empty boxes of a tensor that are here, with views of them."""
    if not isinstance(value, DTensor):
        if value.numel():
            yield Box.whole(tuple(value.shape)), value.detach()
        return
    local, mesh = value.to_local().detach(), value.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank holds shards of its own mesh only"
    placements = [_placement(p) for p in value.placements]
    for box in boxes(tuple(value.shape), tuple(mesh.shape), tuple(coordinate), placements):
        assert box.sizes == tuple(local.shape), (value.shape, value.placements, local.shape)
        yield box, local


def _placement(placement: object) -> Placement:
    if isinstance(placement, _StridedShard):
        return StridedSharded(placement.dim, int(placement.split_factor))
    if isinstance(placement, TorchShard):
        return Sharded(placement.dim)
    assert isinstance(placement, Replicate), f"{placement} holds no part of a logical tensor"
    return Replicated()
