"""Whether what calls leave behind depends on more than the last of them.

A cache of what is the same everywhere may be kept, and so may what the last call left to be looked at. The
first value that was seen, the least, a moving mean, a memory: these depend on which calls came before, so
on the plan. Told apart by calling with other values in between.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from elastic_train.train.collectives.process_group import is_collective_error
from elastic_train.train.model.surroundings import Kept

_OF_USERS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    AttributeError,
)
Alike = Callable[[Sequence[Any], Sequence[Any]], bool]
Prints = Callable[[], Mapping[Any, Hashable]]


def depends(
    before: Mapping[Any, Hashable],
    after: Mapping[Any, Hashable],
    kept: Kept,
    *,
    first: Sequence[Any],
    call: Callable[[bool], list[Any]],
    prints: Prints,
    alike: Alike,
) -> Any:
    """The first of what a call changed that depends on earlier ones; None where nothing does.

    `first` is what that call gave, `kept` what was there before it. `call(True)` is one with other values.
    """
    changed = [place for place in after if before.get(place) != after[place]]
    if not changed:
        return None
    try:
        kept.put_back()
        call(True)
        others = prints()
        if all(others.get(place) == after[place] for place in changed):
            return None  # a cache
        found = call(False)
        again = prints()
        call(True)
        last = prints()
    except _OF_USERS as error:
        if is_collective_error(error):
            raise
        kept.put_back()
        call(False)  # no other values can be given to it
        return None
    moved = [p for p in changed if again.get(p) != after[p] or last.get(p) != others.get(p)]
    if not moved and not alike(first, found):
        moved = changed
    return moved[0] if moved else None


def with_others(values: Any) -> Any:
    """The same with other numbers in its tensors: halves, and where none of them has a fraction the first
    row throughout."""
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    fractions = any(tensor.is_floating_point() for tensor in tensors)
    return pytree.tree_map_only(torch.Tensor, _halved if fractions else _repeated, values)


def _halved(tensor: torch.Tensor) -> torch.Tensor:
    own = tensor.detach()
    return (own * 0.5 if own.is_floating_point() else own.clone()).requires_grad_(tensor.requires_grad)


def _repeated(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1].expand_as(tensor).clone() if tensor.ndim else tensor.clone()
