"""Which positions of a sequence are here, where context parallelism divides them over ranks.

A model and a loss are given a part of the positions then, and the micro-batch as it is. What they compute
with the number of a position, or with the sample as a whole, they ask for here. Elsewhere, and under every
plan without cp, all positions are here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from elastic_train.errors import ConfigError
from elastic_train.train.collectives.mesh_position import MeshPosition
from elastic_train.train.model.dropout import Slice

POSITIONS = 1
"""The dim of an activation that is divided."""

# Of the process, not of a thread: on a device backward recomputes blocks on a thread of torch's own.
_here: Slice | None = None
_asked = False


def here_of(place: MeshPosition) -> Slice | None:
    """Which positions a rank computes on; None: all of them."""
    mesh = place.mesh
    return None if place.context is None else Slice(mesh.coordinate(place.rank)["cp"], mesh.cp)


def part_of_masks(here: Slice | None, spread: Slice | None) -> Slice | None:
    """Of a random mask, what a rank needs whose positions cp divides, and tp within those."""
    if here is None or spread is None:
        return here or spread
    return Slice(here.index * spread.count + spread.index, here.count * spread.count)


def positions_divided() -> bool:
    """Whether a part of the positions is here."""
    return _here is not None


def own_positions(whole: Tensor, dim: int = POSITIONS) -> Tensor:
    """Of a tensor with all positions along `dim`, those that are here: a view; `whole` without cp.

    ConfigError where the ranks do not divide them.
    """
    global _asked
    if _here is None:
        return whole
    _asked = True
    return part_of(whole, _here, dim)


def position_numbers(part: Tensor, dim: int = POSITIONS) -> Tensor:
    """The numbers of the positions that are here, from 0 on: int64 [part.shape[dim]], on its device."""
    size = part.shape[dim]
    first = 0 if _here is None else _here.index * size
    return torch.arange(first, first + size, device=part.device)


def part_of(whole: Tensor, part: Slice, dim: int = POSITIONS) -> Tensor:
    """One of equal parts, a view."""
    size, rest = divmod(whole.shape[dim], part.count)
    if rest:
        legal = [n for n in range(1, whole.shape[dim] + 1) if whole.shape[dim] % n == 0]
        raise ConfigError(
            field="parallelism.cp",
            problem=f"{part.count} ranks do not divide the {whole.shape[dim]} positions of a micro-batch.",
            remedy=f"Legal are {', '.join(map(str, legal))}; or pad the samples in collate().",
        )
    return whole.narrow(dim, part.index * size, size)


@contextmanager
def divided_positions(part: Slice | None) -> Iterator[None]:
    """While open, a part of the positions is here; None: all of them."""
    global _here
    before, _here = _here, part
    try:
        yield
    finally:
        _here = before


@contextmanager
def asking(what: str) -> Iterator[None]:
    """What runs inside has to ask for its positions where they are divided; else ConfigError names `what`."""
    global _asked
    _asked = False
    yield
    if _here is not None and not _asked:
        raise ConfigError(
            field=what,
            problem="it is given the model's output for a part of the positions, as cp divides them, and a "
            "whole micro-batch, and did not ask which part.",
            remedy="Compare the output with elastic_train.own_positions(targets), or use Parallelism(cp=1).",
        )
