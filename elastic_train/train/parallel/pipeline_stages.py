"""Cut a model into the stages of a pipeline: what a stage lacks is replaced by the identity.

The model has to be a chain: what comes before its blocks, the blocks, what comes after, each part a module
that takes one tensor and returns one. Then the model's own forward, run with the identity in the places of
the other stages' parts, is the stage.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from elastic_train.errors import ConfigError
from elastic_train.train.collectives.mesh_position import Stages
from elastic_train.train.model.build import Blueprint
from elastic_train.train.model.tensor_names import NamedTensors, Slot, canonical
from elastic_train.train.task import Rules

Container = nn.ModuleList | nn.Sequential


class Elsewhere(nn.Identity):
    """In the place of a part that is on another stage."""

    def forward(self, input: Any, *_: Any, **__: Any) -> Any:
        return input


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The blocks of a model, in the order in which they run. `path` is their container's name."""

    path: str
    modules: tuple[nn.Module, ...]
    chained: bool  # whether the model is known to be a chain that a pipeline can be cut out of
    everywhere: tuple[str, ...] = ()  # patterns of modules that are on every stage


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A module that is on one stage; `block` is its number, -1 before the blocks, their count after them."""

    parent: nn.Module
    name: str
    block: int


def blocks_of(model: nn.Module, rules: Rules) -> Blocks:
    """The blocks that the rules name as places to cut; else the container with most parameters."""
    containers = [
        (canonical(path), module) for path, module in model.named_modules() if isinstance(module, Container)
    ]
    if rules.stages:
        for path, container in containers:
            names = [f"{path}.{name}" if path else name for name, _ in container.named_children()]
            if names and all(any(fnmatch.fnmatchcase(n, p) for p in rules.stages) for n in names):
                modules = tuple(container.children())
                return Blocks(path=path, modules=modules, chained=True, everywhere=rules.everywhere)
        raise ConfigError(
            field="task.parallelize",
            problem=f"no ModuleList or Sequential has members that match the stages {list(rules.stages)}.",
            remedy="Name the blocks of the model, as in Rules(stages=('layers.*',)).",
        )
    if not containers:
        return Blocks(path="", modules=(), chained=False)
    path, container = max(containers, key=lambda named: sum(p.numel() for p in named[1].parameters()))
    chained = isinstance(model, nn.Sequential) and container is model
    return Blocks(path=path, modules=tuple(container.children()), chained=chained)


def cut_stage(
    blueprint: Blueprint, rules: Rules, ranges: Sequence[tuple[int, int]], stage: int
) -> tuple[Blueprint, Stages]:
    """The model with what is on `stage` alone, changed in place, and on which stages each tensor is.

    `ranges` are the blocks of each stage. ConfigError where the model is no chain.
    """
    blocks = blocks_of(blueprint.model, rules)
    _check(blueprint, blocks, ranges)
    of_block = _of_block(blocks, ranges)
    parts = list(_parts(blueprint.model, blocks))
    stage_of = _stage_of(parts, of_block)
    everywhere = range(len(ranges))
    stages = _placed(blueprint, stage_of, everywhere)
    paths = {id(module): path for path, module in blueprint.model.named_modules()}
    givers = {
        id(slots[0].module): slots[0].module
        for slots in blueprint.parameters.slots.values()
        if stage not in _at(slots[0], stage_of, everywhere)
        and any(stage in _at(slot, stage_of, everywhere) for slot in slots)
    }
    for part in parts:
        if of_block[part.block] != stage:
            part.parent._modules[part.name] = Elsewhere()
    return (
        replace(
            blueprint,
            parameters=_kept(blueprint.parameters, stage, stage_of, givers),
            buffers=_kept(blueprint.buffers, stage, stage_of, {}),
            givers=tuple((paths[key], module) for key, module in givers.items()),
        ),
        stages,
    )


def stages_of(blueprint: Blueprint, rules: Rules, ranges: Sequence[tuple[int, int]]) -> Stages:
    """On which stages each tensor of a whole model would be."""
    blocks = blocks_of(blueprint.model, rules)
    stage_of = _stage_of(list(_parts(blueprint.model, blocks)), _of_block(blocks, ranges))
    return _placed(blueprint, stage_of, range(len(ranges)))


def _of_block(blocks: Blocks, ranges: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Stage by block, with -1 for what comes before the first."""
    of_block = {block: at for at, (low, high) in enumerate(ranges) for block in range(low, high)}
    return of_block | {-1: 0, len(blocks.modules): len(ranges) - 1}


def _placed(blueprint: Blueprint, stage_of: dict[int, int], everywhere: range) -> Stages:
    return {
        fqn: tuple(sorted({at for slot in slots for at in _at(slot, stage_of, everywhere)}))
        for named in (blueprint.parameters, blueprint.buffers)
        for fqn, slots in named.slots.items()
    }


def _check(blueprint: Blueprint, blocks: Blocks, ranges: Sequence[tuple[int, int]]) -> None:
    if not blocks.chained:
        raise ConfigError(
            field="parallelism.pp",
            problem=f"nothing says that {type(blueprint.model).__name__} is a chain of blocks.",
            remedy="Name its blocks with Rules(stages=...) in parallelize(), or use Parallelism(pp=1).",
        )
    if ranges[-1][1] != len(blocks.modules):
        raise ConfigError(
            field="parallelism.pp",
            problem=f"the stages are made for {ranges[-1][1]} blocks, and the model has "
            f"{len(blocks.modules)} in {blocks.path!r}.",
        )


def _parts(model: nn.Module, blocks: Blocks) -> Iterator[_Part]:
    """Everything that is on one stage, from the root down to the blocks' container."""
    at, path = model, ""
    while True:
        if at._parameters and any(p is not None for p in at._parameters.values()):
            raise ConfigError(
                field="parallelism.pp",
                problem=f"{type(at).__name__} around the blocks owns parameters itself, so that no stage "
                "is theirs.",
                remedy="Give them a module of their own before or after the blocks.",
            )
        children = [(name, child) for name, child in at._modules.items() if child is not None]
        if tuple(child for _, child in children) == blocks.modules:
            yield from (_Part(parent=at, name=name, block=n) for n, (name, _) in enumerate(children))
            return
        inside = next(n for n, (_, child) in enumerate(children) if _holds(child, blocks))
        for number, (name, _) in enumerate(children):
            if number != inside and not any(fnmatch.fnmatchcase(path + name, p) for p in blocks.everywhere):
                block = -1 if number < inside else len(blocks.modules)
                yield _Part(parent=at, name=name, block=block)
        path, at = f"{path}{children[inside][0]}.", children[inside][1]


def _stage_of(parts: Sequence[_Part], of_block: Mapping[int, int]) -> dict[int, int]:
    """Stage by module id."""
    found: dict[int, int] = {}
    for part in parts:
        for module in _module(part).modules():
            if found.setdefault(id(module), of_block[part.block]) != of_block[part.block]:
                raise ConfigError(
                    field="parallelism.pp",
                    problem=f"the same {type(module).__name__} is used in two stages.",
                    remedy="Share its parameters instead of the module, or use Parallelism(pp=1).",
                )
    return found


def _module(part: _Part) -> nn.Module:
    module = part.parent._modules[part.name]
    assert module is not None
    return module


def _holds(module: nn.Module, blocks: Blocks) -> bool:
    return any(inner is blocks.modules[0] for inner in module.modules())


def _at(slot: Slot, stage_of: dict[int, int], everywhere: range) -> tuple[int, ...]:
    """The stages of a slot: one, or all where its module is around the blocks."""
    at = stage_of.get(id(slot.module))
    return tuple(everywhere) if at is None else (at,)


def _kept(
    named: NamedTensors, stage: int, stage_of: dict[int, int], givers: dict[int, nn.Module]
) -> NamedTensors:
    """The names of what is on the stage. A giver's slots come last, for the initial values alone."""
    slots: dict[str, tuple[Slot, ...]] = {}
    for fqn, all_slots in named.slots.items():
        here = tuple(s for s in all_slots if stage_of.get(id(s.module), stage) == stage)
        if here:
            slots[fqn] = here + tuple(s for s in all_slots if id(s.module) in givers and s not in here)
    return NamedTensors(slots=slots, aliases=named.aliases)
