"""What each place of the global batch carries from one step to the next, such as the hidden state of a column
of text. Which rank computes a place does not matter, as what was set is put together when the step ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_train.errors import ConfigError
from elastic_train.train.step.micro_batch_work import Work

Places = Callable[[], tuple[range, bool] | None]
"""Those of the micro-batch under way, and whether another rank, or pass, counts it; None outside of one."""


def places_of(job: Work | None, micro_size: int) -> tuple[range, bool] | None:
    """Of a micro-batch that is under way."""
    if job is None:
        return None
    start = job.micro_batch.index * micro_size
    return range(start, start + len(job.micro_batch.ids)), not job.filler


@dataclass(slots=True, eq=False)
class CarriedRows:
    """Declared by `ctx.carry`. `value` has a row, along `dim`, for each place of the global batch."""

    name: str
    _value: torch.Tensor
    dim: int
    places: Places | None = None
    _set: torch.Tensor | None = None  # 1 where a place was set in this step
    _next: torch.Tensor | None = field(default=None)

    @classmethod
    def of(cls, name: str, value: Any, dim: int, places: int, device: torch.device) -> CarriedRows:
        """ConfigError unless it has as many rows as the batch has places."""
        wanted = f"a tensor with {places} rows along dim {dim}, one for each sample of a global batch"
        if not isinstance(value, torch.Tensor) or not -value.ndim <= dim < value.ndim:
            found = type(value).__name__
        elif value.shape[dim] != places:
            found = f"shape {tuple(value.shape)}"
        else:
            return cls(name, value.detach().to(device, copy=True), dim % value.ndim)
        raise ConfigError(field=f"ctx.carry({name!r})", problem=f"must be {wanted}, got {found}.")

    @property
    def value(self) -> torch.Tensor:
        """All rows, as the last step left them. What is set here is what the next step begins with."""
        return self._value

    @value.setter
    def value(self, value: torch.Tensor) -> None:
        self._check("value", value)
        self._value = value.detach().to(self._value.device)

    def get(self) -> torch.Tensor:
        """The rows of this micro-batch, as the last step left them."""
        places, _ = self._now("get")
        return self.value.narrow(self.dim, places.start, len(places)).clone()

    def set(self, rows: torch.Tensor) -> None:
        """The rows of this micro-batch, for the next step. Nothing is differentiated through them."""
        places, counted = self._now("set")
        shape = self.value.narrow(self.dim, places.start, len(places)).shape
        if rows.shape != shape:
            raise ConfigError(
                field=f"ctx.carry({self.name!r}).set",
                problem=f"this micro-batch has rows of shape {tuple(shape)}, got {tuple(rows.shape)}.",
            )
        if not counted:
            return
        if self._next is None or self._set is None:
            self._next = torch.zeros_like(self.value)
            self._set = torch.zeros(self.value.shape[self.dim], dtype=torch.float32, device=self.value.device)
        self._next.narrow(self.dim, places.start, len(places)).copy_(rows.detach())
        self._set[places.start : places.stop] = 1

    def agreed(self, over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The next value, from what all ranks set. All of them call it, before the step's vote."""
        flags = torch.zeros(self.value.shape[self.dim], device=self.value.device)
        flags = over_ranks(flags if self._set is None else self._set)
        before = self._bytes(self.value)
        given = over_ranks(torch.zeros_like(before) if self._next is None else self._bytes(self._next))
        self._next = self._set = None
        rows = torch.where(flags.unsqueeze(1) > 0, given, before).view(self.value.dtype)
        return rows.view(self.value.movedim(self.dim, 0).shape).movedim(0, self.dim).contiguous()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"rows": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._check("load_state_dict", state["rows"])
        self._value.copy_(state["rows"])

    def _bytes(self, value: torch.Tensor) -> torch.Tensor:
        """A copy, (places, bytes of a row). One rank at most sets a place, so bytes add up to what was set.
        Not every dtype can be summed by gloo or NCCL."""
        rows = value.movedim(self.dim, 0).clone(memory_format=torch.contiguous_format)
        return rows.view(len(rows), -1).view(torch.uint8)

    def _check(self, call: str, value: Any) -> None:
        """ConfigError unless it is like the value that was declared."""
        if not isinstance(value, torch.Tensor):
            found = f"got {type(value).__name__}"
        elif (value.shape, value.dtype) != (self._value.shape, self._value.dtype):
            found = f"got shape {tuple(value.shape)} of {value.dtype}"
        else:
            return
        raise ConfigError(
            field=f"ctx.carry({self.name!r}).{call}",
            problem=f"it was declared with shape {tuple(self._value.shape)} of {self._value.dtype}, {found}.",
            remedy="Set a tensor of that shape and dtype, such as torch.zeros_like(carried.value).",
        )

    def _now(self, call: str) -> tuple[range, bool]:
        now = self.places() if self.places is not None else None
        if now is None:
            raise ConfigError(
                field=f"ctx.carry({self.name!r}).{call}",
                problem="there is no micro-batch.",
                remedy="Use it in the loop over a batch: what it gives are the rows of these samples.",
            )
        return now
