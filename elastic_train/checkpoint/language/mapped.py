"""Reading through a specification: the tensors of one system as if they were stored in the form of another.

Nothing is converted beforehand. A box that is asked for becomes boxes of the stored tensors, read straight
into their places in the result; casts and means are computed on what was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from elastic_train.checkpoint.account import Name
from elastic_train.checkpoint.document import Json
from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.language.resolve import Resolved
from elastic_train.checkpoint.language.virtual import Origin, Tile, Virtual, source_box
from elastic_train.checkpoint.lazy_arrays import Array, States, TensorInfo
from elastic_train.checkpoint.ranges import Request
from elastic_train.errors import TensorMismatch
from elastic_train.geometry.box import Box


class Readable(Protocol):
    """What can be read, mapped, compared and exported: a Checkpoint, or a Mapped one."""

    @property
    def url(self) -> str: ...
    @property
    def tensors(self) -> Mapping[Name, TensorInfo]: ...
    @property
    def aliases(self) -> Mapping[str, str]: ...
    @property
    def document(self) -> Mapping[str, Json]: ...
    def read_many(
        self, requests: Sequence[Request], *, into: Sequence[Array] | None = None
    ) -> Sequence[Array]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Want:
    """A box of a stored tensor that goes to `target`, which has the dims of the stored tensor."""

    part: int
    request: Request
    target: Array


class Mapped(Mapping[str, States]):
    """A resolved map over the parts that it was resolved with. Read like a Checkpoint."""

    def __init__(
        self, resolved: Resolved, parts: Sequence[Readable], document: Mapping[str, Json], *, url: str
    ) -> None:
        self.resolved, self.parts, self.document, self.url = resolved, parts, document, url
        self.aliases: Mapping[str, str] = resolved.aliases
        self.tensors: Mapping[Name, TensorInfo] = {
            name: TensorInfo(dtype=v.dtype, shape=v.shape) for name, v in resolved.tensors.items()
        }
        self._states: dict[str, dict[str, TensorInfo]] = {}
        for (tensor, state), info in self.tensors.items():
            self._states.setdefault(tensor, {})[state] = info

    def info(self, tensor: str, state: str) -> TensorInfo:
        return self.tensors[self._name(tensor, state)]

    def read(self, tensor: str, state: str, box: Box | None = None) -> Array:
        """The elements of a box, or all of the tensor."""
        return self.read_many([(tensor, state, box or Box.whole(self.info(tensor, state).shape))])[0]

    def read_many(self, requests: Sequence[Request], *, into: Sequence[Array] | None = None) -> list[Array]:
        """One array per request, of the box's sizes; as Checkpoint.read_many."""
        found: list[Array] = []
        wants: list[_Want] = []
        finish: list[tuple[Virtual, Array, Array, list[tuple[Tile, Box, Array]]]] = []
        for number, (tensor, state, box) in enumerate(requests):
            virtual = self.resolved.tensors[self._name(tensor, state)]
            kind = ELEMENTS[virtual.dtype].numpy
            out: Array = np.empty(box.sizes, kind) if into is None else into[number].view(kind)
            found.append(out)
            raw, means = self._collect(virtual, box, out, wants)
            if raw is not out or means:
                finish.append((virtual, raw, out, means))
        for part in sorted({w.part for w in wants}):
            own = [w for w in wants if w.part == part]
            self.parts[part].read_many([w.request for w in own], into=[w.target for w in own])
        for virtual, raw, out, means in finish:
            for tile, both, many in means:
                mean = many.astype(np.float64).mean(axis=0).astype(raw.dtype)
                assert tile.source is not None
                _stored_view(_part(raw, both), tile.source)[...] = mean
            if raw is not out:
                for name in virtual.casts:
                    raw = raw.astype(ELEMENTS[name].numpy)
                out[...] = raw
        return found

    def __getitem__(self, tensor: str) -> States:
        states = self._states[self.aliases.get(tensor, tensor)]
        return States(states, lambda state, box: self.read(tensor, state, box))

    def __iter__(self) -> Iterator[str]:
        yield from self._states
        yield from self.aliases

    def __len__(self) -> int:
        return len(self._states) + len(self.aliases)

    def _name(self, tensor: str, state: str) -> Name:
        name = (self.aliases.get(tensor, tensor), state)
        if name not in self.tensors:
            raise TensorMismatch(url=self.url, problem=f"it has no {tensor} ({state}).")
        return name

    def _collect(
        self, virtual: Virtual, box: Box, out: Array, wants: list[_Want]
    ) -> tuple[Array, list[tuple[Tile, Box, Array]]]:
        """Ask for the sources of a box: the array they go to, and those of which a mean is made."""
        raw: Array = np.empty(box.sizes, ELEMENTS[virtual.stored].numpy) if virtual.casts else out
        means: list[tuple[Tile, Box, Array]] = []
        for tile in virtual.tiles:
            both = tile.box.intersect(box) if box.numel else None
            if both is None:
                continue
            place = both.within(box)
            if tile.source is None:
                _part(raw, place)[...] = np.zeros((), raw.dtype)
                continue
            at = source_box(tile.source, tile.box, both)
            request = (tile.source.tensor, tile.source.state, at)
            first, *others = tile.source.parts
            if not others:
                target = _stored_view(_part(raw, place), tile.source)
                wants.append(_Want(part=first, request=request, target=target))
                continue
            many: Array = np.empty((1 + len(others), *at.sizes), raw.dtype)
            means.append((tile, place, many))
            targets = zip((first, *others), many, strict=True)
            wants += [_Want(part=p, request=request, target=target) for p, target in targets]
        return raw, means


def _part(array: Array, box: Box) -> Array:
    """A view, also of an array without dims, which indexing would make a number."""
    return array[(*box.slices, ...)]


def _stored_view(array: Array, at: Origin) -> Array:
    """A part of the result, seen with the dims of the stored tensor that fills it."""
    kept = array[(*(0 if axis is None else slice(None) for axis in at.axes), ...)]
    axes = [axis for axis in at.axes if axis is not None]
    turned = np.transpose(kept, np.argsort(axes)) if axes else kept
    return turned[(*(slice(None) if s in axes else np.newaxis for s in range(len(at.origin))), ...)]
