"""ZeRO-3: every parameter is cut among the ranks by itself, and padded by itself.

Rank r holds elements r * ceil(numel / ranks) and on of each parameter, in the order of the model files'
`param_shapes`, one list per sub-group; sub-groups are pieces of a parameter group, not groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_train.checkpoint.importers.deepspeed_experts import Experts
from elastic_train.checkpoint.importers.deepspeed_files import Tag
from elastic_train.checkpoint.importers.deepspeed_model import shapes_by_group
from elastic_train.checkpoint.importers.foreign_document import OptimizerState, hyperparameters, lost_settings
from elastic_train.checkpoint.importers.foreign_rows import flat_rows
from elastic_train.checkpoint.importers.torch_file import TorchFile
from elastic_train.checkpoint.importers.tp_patterns import Shape
from elastic_train.checkpoint.importers.zero12 import optimizer_state
from elastic_train.checkpoint.importers.zero_state import (
    FlatBuffer,
    Scalars,
    buffers,
    common_numbers,
    optimizer_of,
)
from elastic_train.checkpoint.manifest import Row
from elastic_train.errors import FormatUnsupported, TensorMismatch


def read_zero3(tag: Tag, experts: Experts) -> tuple[list[Row], OptimizerState]:
    """Rows and scalars of everything that the optimizer files hold."""
    dp, mp = tag.ranks
    if mp != 1:
        raise FormatUnsupported(
            url=tag.url, problem=f"{mp} model-parallel ranks wrote it under ZeRO-3, which can't be read yet."
        )
    shapes = agreed_shapes(tag)
    held = [_buffers(tag, rank) for rank in range(dp)]
    numbers = common_numbers(tag.model().store, held, url=tag.url)
    if len(numbers) != len(shapes):
        raise TensorMismatch(
            url=tag.url,
            problem=f"its models have {len(shapes)} sub-groups and its optimizers {len(numbers)}.",
        )
    rows: list[Row] = []
    for number, group in enumerate(shapes):
        for rank in range(dp):
            cut = _cut(tag, rank, number, experts)
            rows.extend(_sub_group_rows(tag, group, held[rank][number], cut, experts))
    file = tag.optimizers[0, 0]
    settings = optimizer_of(file)["optimizer_state_dict"]["param_groups"]
    return rows, state_of_sub_groups(file, settings, [list(g) for g in shapes], numbers, rows)


def agreed_shapes(tag: Tag) -> list[dict[str, Shape]]:
    """The shapes by sub-group, which every rank's model file repeats."""
    shapes = shapes_by_group(tag.model())
    for file in tag.models.values():
        if file.tree is not tag.model().tree and shapes_by_group(file) != shapes:
            raise TensorMismatch(
                url=file.url,
                problem="its parameters aren't those of rank 0: the files are of two checkpoints.",
            )
    return shapes


def state_of_sub_groups(
    file: TorchFile,
    settings: Sequence[dict[str, Any]],
    shapes: Sequence[Sequence[str]],
    numbers: Sequence[Scalars],
    rows: Sequence[Row],
) -> OptimizerState:
    """`params` of a parameter group numbers its sub-groups; all of them have its hyperparameters."""
    members: list[list[int]] = [list(group["params"]) for group in settings]
    if sorted(n for own in members for n in own) != list(range(len(shapes))):
        raise TensorMismatch(
            url=file.url,
            problem=f"its parameter groups have sub-groups {members} and there are {len(shapes)}.",
        )
    for own in members:
        if any(numbers[n] != numbers[own[0]] for n in own):
            raise FormatUnsupported(
                url=file.url, problem="sub-groups of one group have made different numbers of steps."
            )
    found = optimizer_state(
        [[fqn for n in own for fqn in shapes[n]] for own in members],
        [hyperparameters(file, group) for group in settings],
        [numbers[own[0]] if own else {} for own in members],
        rows,
        url=file.url,
    )
    return replace(found, lost=lost_settings(settings))


def _buffers(tag: Tag, rank: int) -> list[FlatBuffer]:
    file = tag.optimizers[rank, 0]
    zero = optimizer_of(file)
    return buffers(file, zero["fp32_flat_groups"], zero["optimizer_state_dict"]["state"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """Which part of a sub-group a rank has: shard `rank` of `count`, of the experts of part `part`."""

    rank: int
    count: int
    part: int
    degree: int


def _cut(tag: Tag, rank: int, number: int, experts: Experts) -> _Cut:
    """What the rank's file says of it, where it says so; else every rank has a shard of everything."""
    file = tag.optimizers[rank, 0]
    zero, dp = optimizer_of(file), tag.ranks[0]
    said = zero.get("ds_zero_partition_groups")
    if not said:
        counts = zero.get("partition_count")
        for count in counts if isinstance(counts, list) else [counts]:
            if count not in (None, dp):
                raise experts.refused(count, file)
        return _Cut(rank=rank, count=dp, part=0, degree=1)
    own = said[number]
    count, shard = own["partition_count"], own["partition_rank"]
    degree = experts.degree(count, file)
    found = [
        p for p in range(degree) if rank in (members := experts.holders(p, degree)) and members[shard] == rank
    ]
    if len(found) != 1:
        raise TensorMismatch(
            url=file.url, problem=f"it says that it has shard {shard} of {count}, which isn't rank {rank}'s."
        )
    return _Cut(rank=shard, count=count, part=found[0], degree=degree)


def _sub_group_rows(
    tag: Tag, shapes: dict[str, Shape], buffer: FlatBuffer, cut: _Cut, experts: Experts
) -> Iterator[Row]:
    name, at = tag.name(buffer.file), 0
    for fqn, shape in shapes.items():
        tensor, of = experts.place(fqn, shape, cut.part, cut.degree)
        numel = of.numel
        share = -(-numel // cut.count)
        count = max(0, min(share, numel - cut.rank * share))
        if count:
            first = cut.rank * share
            yield from flat_rows(
                buffer.file, name, tensor, buffer.parts, at=at, first=first, count=count, of=of
            )
        at += share
    if at != buffer.numel:
        raise TensorMismatch(
            url=buffer.file.url,
            problem=f"a buffer has {buffer.numel} elements and its parameters take {at}: it isn't of this "
            "checkpoint.",
        )
