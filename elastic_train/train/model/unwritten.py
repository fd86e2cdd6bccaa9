"""Find tensors that a model's code made with `torch.empty` and never wrote."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode

_MARKS = {
    2: (torch.int16, 0x7FE5),
    4: (torch.int32, 0x7FE5A5E5),
    8: (torch.int64, 0x7FFE5A5E5A5E5A5E),
}
"""Bits by item size. In a floating dtype each is a NaN that no arithmetic makes."""
_BLOCK = 1 << 24  # elements compared at a time: bounds the extra memory


class MarkUnwritten(TorchFunctionMode):
    """Within it, memory that has no values yet is filled with marks; bytes and flags, that have none, with
    zeros. So what is left of `torch.empty` is the same in every process, and is found.
    """

    _MAKERS: ClassVar = frozenset(
        {
            torch.empty,
            torch.empty_like,
            torch.empty_permuted,
            torch.empty_strided,
            torch.Tensor.new_empty,
            torch.Tensor.new_empty_strided,
        }
    )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in self._MAKERS and type(made) is torch.Tensor and made.device.type == "cpu":
            with torch.no_grad():
                _mark(made.detach())
        return made


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Whether marks are left: in one element of a floating tensor, or in all of another one."""
    floating = tensor.is_floating_point() or tensor.is_complex()
    bits = _bits(tensor.detach())
    if bits is None or not bits.numel():
        return False
    _, mark = _MARKS[bits.element_size()]
    left = (bool((block == mark).any() if floating else (block == mark).all()) for block in _blocks(bits))
    return any(left) if floating else all(left)


def _mark(tensor: torch.Tensor) -> None:
    bits = _bits(tensor)
    if bits is not None:
        bits.fill_(_MARKS[bits.element_size()][1])
    elif tensor.layout is torch.strided:
        tensor.zero_()


def _bits(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor as integers; None where its items are too small for a mark."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    marked = _MARKS.get(tensor.element_size())
    return None if marked is None else tensor.view(marked[0])


def _blocks(bits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return bits.reshape(-1).split(_BLOCK)
