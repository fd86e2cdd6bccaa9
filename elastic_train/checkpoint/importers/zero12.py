"""ZeRO-1 and ZeRO-2 (and DeepSpeed's bf16 optimizer): parameters in flat groups, each cut among the ranks.

Every rank records which elements of its shard are which parameter's (`param_slice_mappings`, starts local to
the shard); the pieces of a parameter follow one another in the order of ranks. Master weights are saved
without the padding at the end of a group, moments with it, so nothing but the mapping says where things are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastic_train.checkpoint.importers.deepspeed_experts import Experts
from elastic_train.checkpoint.importers.deepspeed_files import Tag
from elastic_train.checkpoint.importers.deepspeed_model import check_owned, shapes_by_group
from elastic_train.checkpoint.importers.foreign_document import (
    OptimizerState,
    hyperparameters,
    in_groups,
    lost_settings,
)
from elastic_train.checkpoint.importers.foreign_rows import FileSlice, flat_rows
from elastic_train.checkpoint.importers.tp_patterns import Shape, TensorParallel
from elastic_train.checkpoint.importers.zero_state import (
    FlatBuffer,
    Scalars,
    buffers,
    common_numbers,
    optimizer_of,
)
from elastic_train.checkpoint.manifest import Row
from elastic_train.errors import ChecksumMismatch, FormatUnsupported, FragmentMissing, TensorMismatch

Mappings = list[dict[str, tuple[int, int]]]
"""Group by group: fqn -> (start, numel) in the rank's shard."""


def read_zero12(tag: Tag, parallel: TensorParallel, experts: Experts) -> tuple[list[Row], OptimizerState]:
    """Rows and scalars of everything that the optimizer files hold."""
    dp, mp = tag.ranks
    held = {rank: _buffers(tag, rank) for rank in sorted(tag.optimizers)}
    numbers = common_numbers(tag.model().store, held.values(), url=tag.url)
    every = [_degrees(tag, rank, experts, len(numbers)) for rank in held]
    degrees = every[0]
    if any(own != degrees for own in every):
        raise TensorMismatch(url=tag.url, problem="its ranks don't say the same of how groups are cut.")
    mappings = {rank: _mappings(tag, rank) for rank in held}
    shapes = {m: {k: v for g in shapes_by_group(tag.model(m)) for k, v in g.items()} for m in range(mp)}
    rows: list[Row] = []
    groups: list[list[str]] = [[] for _ in numbers]
    seen: set[str] = set()
    for stage in range(mp // parallel.degree):
        members = range(stage * parallel.degree, (stage + 1) * parallel.degree)
        named = shapes[members[0]]
        for number, fqns in enumerate(_order(mappings, dp, members, len(numbers), tag)):
            for fqn in fqns:
                if fqn not in named:
                    check_owned(tag, [fqn], named)
                if fqn in seen:
                    if stage and parallel.only_in_first_stage(fqn):
                        continue
                    raise TensorMismatch(url=tag.url, problem=f"{fqn} is in two groups or pipeline stages.")
                seen.add(fqn)
                if experts.of(fqn):
                    shards = [held[r, 0][number] for r in range(dp)]
                    places = [mappings[r, 0][number].get(fqn, (0, 0)) for r in range(dp)]
                    found = _expert_rows(tag, fqn, named[fqn], shards, places, degrees[number], experts)
                    for name, own in found:
                        rows.extend(own)
                        groups[number] += [] if name in groups[number][-1:] else [name]
                    continue
                if degrees[number] != 1:
                    raise TensorMismatch(
                        url=tag.url, problem=f"{fqn} is cut among some of the ranks and isn't an expert's."
                    )
                groups[number].append(fqn)
                slices = parallel.slices(fqn, [_shape(shapes[m], fqn, tag) for m in members])
                for m, part in zip(members, slices, strict=True):
                    if part is not None:
                        shards = [held[r, m][number] for r in range(dp)]
                        places = [mappings[r, m][number].get(fqn, (0, 0)) for r in range(dp)]
                        rows.extend(_parameter_rows(tag, fqn, part, shards, places))
    check_owned(tag, sorted(seen), {k for own in shapes.values() for k in own})
    return rows, _state(tag, groups, numbers, rows)


def _degrees(tag: Tag, rank: tuple[int, int], experts: Experts, groups: int) -> list[int]:
    """Among how many ranks each group's experts are divided, 1 for groups that all ranks have in common."""
    file = tag.optimizers[rank]
    count = optimizer_of(file).get("partition_count")
    counts = count if isinstance(count, list) else [count] * groups
    if len(counts) != groups:
        raise TensorMismatch(url=file.url, problem=f"it has {groups} groups and is cut in {counts} parts.")
    return [1 if c is None else experts.degree(c, file) for c in counts]


def _expert_rows(
    tag: Tag,
    fqn: str,
    shape: Shape,
    held: Sequence[FlatBuffer],
    places: Sequence[tuple[int, int]],
    degree: int,
    experts: Experts,
) -> Iterator[tuple[str, list[Row]]]:
    """What is called `fqn` on every rank, by the name in the whole model; shards and places by rank."""
    for part in range(degree):
        ranks = experts.holders(part, degree)
        name, of = experts.place(fqn, shape, part, degree)
        shards = [held[r] for r in ranks]
        yield name, list(_parameter_rows(tag, name, of, shards, [places[r] for r in ranks]))


def _parameter_rows(
    tag: Tag, fqn: str, part: FileSlice, shards: Sequence[FlatBuffer], places: Sequence[tuple[int, int]]
) -> Iterator[Row]:
    """A parameter's pieces on all ranks, if they join up to all of its elements."""
    pieces = [(shard, start, numel) for shard, (start, numel) in zip(shards, places, strict=True) if numel]
    total = sum(numel for *_, numel in pieces)
    if total != part.numel:
        kind = FragmentMissing if total < part.numel else TensorMismatch
        raise kind(
            url=tag.url, problem=f"{fqn} has {part.numel} elements and the optimizer's files hold {total}."
        )
    first = 0
    for index, (shard, start, numel) in enumerate(pieces):
        torn = (index and start != 0) or (index + 1 < len(pieces) and start + numel != shard.numel)
        if torn:
            raise ChecksumMismatch(
                url=shard.file.url,
                problem=f"its piece of {fqn} doesn't continue the piece of the rank before: files changed "
                "places, or "
                "are of two checkpoints.",
            )
        yield from flat_rows(
            shard.file, tag.name(shard.file), fqn, shard.parts, at=start, first=first, count=numel, of=part
        )
        first += numel


def _buffers(tag: Tag, rank: tuple[int, int]) -> list[FlatBuffer]:
    file = tag.optimizers[rank]
    zero = optimizer_of(file)
    base = zero.get("base_optimizer_state")
    if not isinstance(base, Mapping) or not isinstance(base.get("state"), Mapping):
        raise FormatUnsupported(
            url=file.url,
            problem="its moments are in the form of elastic_checkpoint, which doesn't say whose they are. "
            "Save it with "
            "elastic_checkpoint off.",
        )
    return buffers(file, zero["single_partition_of_fp32_groups"], base["state"])


def _mappings(tag: Tag, rank: tuple[int, int]) -> Mappings:
    file = tag.optimizers[rank]
    found: Mappings = []
    for group in optimizer_of(file)["param_slice_mappings"]:
        places: dict[str, tuple[int, int]] = {}
        for fqn, address in group.items():
            start, numel = address.get("start"), address.get("numel")
            if not isinstance(start, int) or not isinstance(numel, int) or start < 0 or numel < 0:
                raise FormatUnsupported(
                    url=file.url, problem=f"the place of {fqn} isn't recorded in a form known here."
                )
            places[str(fqn)] = (start, numel)
        found.append(places)
    return found


def _order(
    mappings: Mapping[tuple[int, int], Mappings], dp: int, members: Sequence[int], groups: int, tag: Tag
) -> list[list[str]]:
    """The parameters of each group of a pipeline stage, in the order of its buffer."""
    found: list[list[str]] = []
    if any(len(mappings[r, m]) != groups for r in range(dp) for m in members):
        raise TensorMismatch(url=tag.url, problem="its ranks don't have the same number of parameter groups.")
    for number in range(groups):
        found.append(
            list(dict.fromkeys(fqn for m in members for r in range(dp) for fqn in mappings[r, m][number]))
        )
    return found


def _shape(shapes: Mapping[str, Shape], fqn: str, tag: Tag) -> Shape:
    if fqn not in shapes:
        raise TensorMismatch(url=tag.url, problem=f"{fqn} isn't on every tensor-parallel rank.")
    return shapes[fqn]


def _state(tag: Tag, groups: list[list[str]], numbers: list[Scalars], rows: Sequence[Row]) -> OptimizerState:
    file = tag.optimizers[0, 0]
    settings: list[dict[str, Any]] = optimizer_of(file)["base_optimizer_state"]["param_groups"]
    found = optimizer_state(groups, [hyperparameters(file, g) for g in settings], numbers, rows, url=file.url)
    return replace(found, lost=lost_settings(settings))


def optimizer_state(
    groups: Sequence[Sequence[str]],
    settings: Sequence[dict[str, Any]],
    numbers: Sequence[Scalars],
    rows: Sequence[Row],
    *,
    url: str,
) -> OptimizerState:
    """Hyperparameters and numbers by fqn. A `step` that is kept per group becomes every parameter's."""
    if len(groups) != len(settings):
        raise TensorMismatch(
            url=url, problem=f"it has {len(groups)} groups of parameters and settings for {len(settings)}."
        )
    scalars: dict[str, Scalars] = {}
    for fqns, own, said in zip(groups, settings, numbers, strict=True):
        shared = {"step": {"value": own.pop("step")}} if "step" in own else {}
        for fqn in fqns:
            if shared or said:
                scalars[fqn] = {**shared, **said}
    states = {(r.tensor, r.state) for r in rows if r.state != "param"}
    return OptimizerState(groups=in_groups(groups, settings), scalars=scalars, states=tuple(sorted(states)))
