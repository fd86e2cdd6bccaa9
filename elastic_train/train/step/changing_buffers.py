"""Buffers that forward changes (running statistics): recorded by micro-batch, folded in their order.

During a micro-batch a normalisation layer writes into scratch tensors, with momentum 1, so that they hold
exactly the statistics of that call; the state itself never changes before a step is voted. Each micro-batch
has one writer, so the gathered table, and what is folded from it, are the same under every plan.

Any other buffer that a forward changes would differ between ranks and is refused where there are several.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from elastic_train.errors import ConfigError
from elastic_train.train.model.compiled import inside, is_compiled_in_place, untraced
from elastic_train.train.model.copies import EngineHook
from elastic_train.train.model.tensor_names import NamedTensors, Slot, buffers_of
from elastic_train.train.state.live_fragments import numpy_bits

_COUNT = "num_batches_tracked"


@dataclass(slots=True, kw_only=True, eq=False)
class _Norm:
    """A layer with running statistics and its columns in the table: mean, variance, number of calls."""

    module: Any
    fqns: dict[str, str]  # name in the module -> fqn
    first: int
    kept: dict[str, Tensor]  # the state, while a micro-batch writes elsewhere; else empty
    momentum: float | None

    @property
    def width(self) -> int:
        return self.module.num_features

    @property
    def columns(self) -> tuple[slice, slice, int]:
        middle, last = self.first + self.width, self.first + 2 * self.width
        return slice(self.first, middle), slice(middle, last), last

    def scratch_in(self) -> None:
        """Give the module tensors to write to, of no value."""
        self.module._buffers.update({name: torch.zeros_like(tensor) for name, tensor in self.kept.items()})

    @property
    def cumulative(self) -> bool:
        """Whether the statistics are averages over all calls so far instead of exponential ones."""
        return self.momentum is None and isinstance(self.module, _BatchNorm)


@dataclass(slots=True, kw_only=True, eq=False)
class _Watched:
    slot: Slot
    tensor: Tensor
    version: int
    content: int


class ChangingBuffers:
    """The buffers of one rank's model. `watch` each micro-batch, then `fold` once per step."""

    def __init__(self, model: nn.Module, world_size: int, data: dist.ProcessGroup | None = None) -> None:
        """`world_size` is the most ranks that there may ever be, `data` those that run other micro-batches
        through the same part of the model."""
        self._data = data
        named = buffers_of(model)
        self._places = {fqn: slots[0] for fqn, slots in named.slots.items()}
        self._slots = list(self._places.values())
        self._norms = _norms(named)
        self._width = sum(2 * norm.width + 1 for norm in self._norms)
        self._rows: dict[int, Tensor] = {}
        self._row: Tensor | None = None
        within = inside(model)
        for norm in self._norms:
            if world_size > 1 and isinstance(norm.module, nn.SyncBatchNorm):
                raise ConfigError(
                    field=norm.fqns["running_mean"],
                    problem="SyncBatchNorm normalises over ranks, so the model would depend on the plan.",
                    remedy="Use BatchNorm: its statistics are those of a micro-batch under every plan.",
                )
            record = partial(self._record, norm)
            traced = id(norm.module) in within or is_compiled_in_place(norm.module)
            norm.module.register_forward_hook(EngineHook(untraced(record) if traced else record))
        own = {fqn for norm in self._norms for fqn in norm.fqns.values()}
        self._watched = {
            fqn: _watched(slots[0]) for fqn, slots in named.slots.items() if world_size > 1 and fqn not in own
        }
        self._look_closely = True
        self._own = {
            fqn: (slots[0], tensor)
            for fqn, slots in named.slots.items()
            if world_size == 1
            and fqn not in own
            and slots[0].name not in slots[0].module._non_persistent_buffers_set
            and (tensor := slots[0].module._buffers[slots[0].name]) is not None
        }

    @property
    def changing(self) -> tuple[str, ...]:
        """The buffers that `fold` gives new values."""
        return tuple(
            fqn
            for norm in self._norms
            for name, fqn in norm.fqns.items()
            if name != _COUNT or isinstance(norm.module, _BatchNorm)
        )

    @property
    def rows(self) -> Mapping[int, Tensor]:
        """What layers saw in this step, by micro-batch, until it is folded."""
        return self._rows

    def begin(self, rows: Mapping[int, Tensor] = MappingProxyType({})) -> None:
        """A step begins, with what was seen of it already."""
        self._rows = dict(rows)

    @contextmanager
    def watch(self, index: int, filler: bool) -> Iterator[None]:
        """Forward and backward of a micro-batch belong inside. A filler leaves no trace."""
        self._row = None
        if self._norms and not filler:
            self._row = self._rows[index] = self._zeros()
        self._swap_in()
        try:
            yield
        finally:
            self._swap_out()
        self._refuse_changes()

    def adopt(self, buffers: Mapping[str, Tensor]) -> None:
        """What others than a forward did to buffers since the last step is what they are from now on: their
        values, and what hangs in the places of `buffers`, by fqn. ConfigError where that has another shape or
        dtype.
        """
        for fqn, slot in self._places.items():
            now, ours = slot.module._buffers.get(slot.name), buffers.get(fqn)
            if now is ours or ours is None or slot.name in slot.module._non_persistent_buffers_set:
                continue
            if now is None or now.shape != ours.shape or now.dtype != ours.dtype:
                raise _odd(fqn, "the loop")
            ours.copy_(now.detach())
            slot.module._buffers[slot.name] = ours
        for fqn, watched in self._watched.items():
            now = watched.slot.module._buffers.get(watched.slot.name)
            if now is not None and (now is not watched.tensor or now._version != watched.version):
                self._watched[fqn] = _watched(watched.slot)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """A forward inside of a watched micro-batch leaves no trace, in no buffer."""
        row, self._row = self._row, None
        kept = [
            (slot.module, slot.name, tensor, tensor.clone())
            for slot in self._slots
            if (tensor := slot.module._buffers[slot.name]) is not None
        ]
        try:
            yield
        finally:
            self._row = row
            for module, name, tensor, content in kept:
                module._buffers[name] = tensor
                if _content(tensor) != _content(content):
                    tensor.copy_(content)

    def fold(self, micro_batches: int) -> dict[str, Tensor]:
        """Values that the buffers have after a step of that many micro-batches; the buffers stay as they are.

        All `data` ranks call it together and get the same values.
        """
        rows, self._rows = self._rows, {}
        if not self._norms:
            return self._replaced()
        table = self._zeros(micro_batches)
        for index, row in rows.items():
            table[index] = row
        if self._data is not None:
            dist.all_reduce(table, group=self._data)
        table = table.double()
        folded = {fqn: value for norm in self._norms for fqn, value in _folded(norm, table).items()}
        return folded | self._replaced()

    def _replaced(self) -> dict[str, Tensor]:
        """In a run of one rank: what forward put in the places of buffers. Ours hang there again."""
        found: dict[str, Tensor] = {}
        for fqn, (slot, tensor) in self._own.items():
            now = slot.module._buffers.get(slot.name)
            if now is tensor:
                continue
            if now is None or now.shape != tensor.shape or now.dtype != tensor.dtype:
                raise _odd(fqn, "forward")
            found[fqn] = now.detach().clone()
            slot.module._buffers[slot.name] = tensor
        return found

    def _zeros(self, *rows: int) -> Tensor:
        means = [norm.module._buffers["running_mean"] for norm in self._norms]
        dtype = torch.float64 if any(mean.dtype == torch.float64 for mean in means) else torch.float32
        return torch.zeros(*rows, self._width, dtype=dtype, device=means[0].device)

    def _record(self, norm: _Norm, module: nn.Module, inputs: Any, output: Any) -> None:
        """After a call in training: add its statistics to the row of the micro-batch."""
        if not norm.kept:
            return
        recomputed = torch._C._current_graph_task_id() != -1
        if self._row is not None and not recomputed:
            mean, variance, calls = norm.columns
            keep, weight = _weights(norm)
            for columns, name in ((mean, "running_mean"), (variance, "running_var")):
                self._row[columns].mul_(keep).add_(norm.module._buffers[name], alpha=weight)
            self._row[calls] += 1
        # Anew for each call: autograd holds on to what a call was given, and 0 x NaN would be NaN.
        norm.scratch_in()

    def _swap_in(self) -> None:
        for norm in self._norms:
            if norm.module.training:  # else forward reads the statistics
                norm.kept = {name: norm.module._buffers[name] for name in norm.fqns}
                norm.momentum, norm.module.momentum = norm.module.momentum, 1.0
                norm.scratch_in()

    def _swap_out(self) -> None:
        for norm in self._norms:
            if norm.kept:
                norm.module._buffers.update(norm.kept)
                norm.module.momentum, norm.kept = norm.momentum, {}

    def _refuse_changes(self) -> None:
        """The first time by content too: writes through `.data` change no version."""
        closely, self._look_closely = self._look_closely, False
        for fqn, watched in self._watched.items():
            slot = watched.slot
            now = slot.module._buffers.get(slot.name)
            if now is None:
                raise _changed(fqn)
            if now is not watched.tensor:
                if slot.name not in slot.module._non_persistent_buffers_set:
                    raise _changed(fqn)
                self._watched[fqn] = _watched(slot)  # a cache that was computed anew, not state
            elif closely or now._version != watched.version:
                if _content(now) != watched.content:
                    raise _changed(fqn)
                watched.version = now._version


def _norms(named: NamedTensors) -> list[_Norm]:
    found: dict[int, _Norm] = {}
    first = 0
    for fqn, slots in named.slots.items():
        module = slots[0].module
        if not isinstance(module, _NormBase) or module.running_mean is None:
            continue
        if id(module) not in found:
            found[id(module)] = _Norm(module=module, fqns={}, first=first, kept={}, momentum=module.momentum)
            first += 2 * module.num_features + 1
        if slots[0].name in ("running_mean", "running_var", _COUNT):
            found[id(module)].fqns[slots[0].name] = fqn
    return list(found.values())


def _weights(norm: _Norm) -> tuple[float, float]:
    """What a call multiplies the statistics so far with, and its own."""
    if norm.cumulative:
        return 1.0, 1.0
    momentum = norm.momentum or 0.0
    return 1.0 - momentum, momentum


def _folded(norm: _Norm, table: Tensor) -> dict[str, Tensor]:
    """New values of a layer's buffers from the rows of all micro-batches, as if taken one after the other."""
    mean, variance, number = norm.columns
    buffers = norm.module._buffers
    calls = table[:, number]
    counted = buffers[_COUNT].double() if _COUNT in norm.fqns else torch.zeros_like(calls[0])
    keep, _ = _weights(norm)
    later = calls.flip(0).cumsum(0).flip(0) - calls  # calls after each micro-batch
    values: dict[str, Tensor] = {}
    for columns, name in ((mean, "running_mean"), (variance, "running_var")):
        value, rows = buffers[name].double(), table[:, columns]
        if norm.cumulative:
            average = (value * counted + rows.sum(0)) / (counted + calls.sum()).clamp(min=1)
            value = torch.where(calls.sum() > 0, average, value)
        else:
            value = value * keep ** calls.sum() + (rows * (keep**later)[:, None]).sum(0)
        values[norm.fqns[name]] = value.to(buffers[name].dtype)
    if _COUNT in norm.fqns and isinstance(norm.module, _BatchNorm):
        values[norm.fqns[_COUNT]] = (counted + calls.sum()).to(buffers[_COUNT].dtype)
    return values


def _watched(slot: Slot) -> _Watched:
    tensor = slot.module._buffers[slot.name]
    assert tensor is not None
    return _Watched(slot=slot, tensor=tensor, version=tensor._version, content=_content(tensor))


def _content(tensor: Tensor) -> int:
    return zlib.crc32(numpy_bits(tensor.detach().cpu().contiguous()).data)


def _odd(fqn: str, who: str) -> ConfigError:
    return ConfigError(
        field=f"model.{fqn}",
        problem=f"{who} puts a buffer of another shape or dtype in the place of this one.",
        remedy="Keep its shape and dtype, or register it with persistent=False.",
    )


def _changed(fqn: str) -> ConfigError:
    return ConfigError(
        field=f"model.{fqn}",
        problem="forward changes this buffer, so that every rank would come to hold another value.",
        remedy="Only running statistics of torch's normalisation layers may change there. Keep other state "
        "out of forward, or allow the run one worker, with ScalingConfig(num_workers=1).",
    )
