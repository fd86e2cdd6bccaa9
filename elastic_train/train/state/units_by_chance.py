"""Whether a model calls parts of itself by chance: ranks that cut them would wait for different gathers.

Stochastic depth and the like are fine where parameters are whole. Under dp_shard each part is gathered by all
ranks when it is called, and ranks draw different numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from elastic_train.train.model.plain_build import seed_as_a_script_does
from elastic_train.train.model.rng import preserved
from elastic_train.train.model.tensor_names import canonical

TURNS = 16
SMALL = 64
"""Elements of a draw that a model may branch on; larger ones are noise and masks."""


class UnitsByChance(Exception):
    """The units that one forward called and another one did not."""


def check_units(model: nn.Module, mode: FakeTensorMode, forward: Callable[[], object]) -> None:
    """UnitsByChance where forwards with other random numbers call other units of dp_shard, or in other order.

    `forward` runs on tensors without values. Where its code draws nothing that it could branch on, it runs
    once. Generators are left as they were.
    """
    with preserved():
        first, chance = _called(model, mode, forward, turn=0)
        others = [_called(model, mode, forward, turn)[0] for turn in range(1, TURNS if chance else 0)]
    for other in others:
        if other != first:
            odd = sorted(set(first) ^ set(other)) or first
            raise UnitsByChance(f"forward calls {odd[0]!r} by chance, and ranks draw different numbers")


def _called(
    model: nn.Module, mode: FakeTensorMode, forward: Callable[[], object], turn: int
) -> tuple[list[str], bool]:
    """The units in the order of their calls, and whether something was drawn that code may look at."""
    order: list[str] = []
    hooks = [
        module.register_forward_pre_hook(partial(_note, order, canonical(path)))
        for path, module in model.named_modules()
        if isinstance(cast(object, module), FSDPModule)
    ]
    seed_as_a_script_does(turn)
    before = _host_states()
    try:
        with SmallDraws(mode) as draws:
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    return order, draws.drew or before != _host_states()


def _note(order: list[str], path: str, *_: object) -> None:
    order.append(path)


def _host_states() -> tuple[object, ...]:
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2]


class SmallDraws(TorchDispatchMode):
    """Gives values to small random tensors, so that code can branch on them; all others stay without.

    Where what they are drawn from has no value itself, it is taken as a half: which branches there are is
    asked, not how often each is taken.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self.drew = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        drawn = torch.Tag.nondeterministic_seeded in func.tags and isinstance(out, torch.Tensor)
        if not drawn or out.numel() > SMALL:
            return out
        with unset_fake_temporarily():
            values, options = tree_map_only(torch.Tensor, _valued, (args, kwargs or {}))
            value = func(*values, **options)
        self.drew = True
        if any(out is given for given in args):  # drawn in place
            cast(Any, out).constant = value
            return out
        return self._mode.fake_tensor_converter.from_real_tensor(self._mode, value, make_constant=True)


def _valued(given: torch.Tensor) -> torch.Tensor:
    known = getattr(given, "constant", None)
    if known is not None:
        return known.clone()
    return torch.full(given.shape, 0.5).to(given.dtype)
