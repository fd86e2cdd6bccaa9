"""L-BFGS whose state is kept by parameter, so that it is saved and handed on as that of other optimizers.

torch keeps flat tensors of all parameters and lists of them under the first parameter. Here a step puts these
together, lets torch's own class work on them, and cuts the outcome along the parameters again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from elastic_train.errors import ConfigError

_FLAT = ("d", "prev_flat_grad")
_LISTS = ("old_dirs", "old_stps")
_SCALARS = ("func_evals", "n_iter", "t", "H_diag", "prev_loss")


class LBFGS(torch.optim.LBFGS):
    """torch's, which computes the loss as often as it likes."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        parameters: list[nn.Parameter] = self.param_groups[0]["params"]
        if closure is None:
            if all(parameter.grad is None for parameter in parameters):
                return None
            raise ConfigError(
                field="ctx.optimizer",
                problem="LBFGS computes the loss several times per step, and was given a gradient only.",
                remedy="Call step.closure(optimizer, compute) in the block; compute iterates the batch.",
            )
        kept = self.state
        self._params, self._numel_cache = parameters, None
        first = self._put_together(parameters, kept)
        self.state = type(kept)(dict, {parameters[0]: first})  # type: ignore[assignment]
        try:
            return super().step(closure)
        finally:
            self.state = kept
            self._cut(parameters, first, kept)

    @staticmethod
    def _put_together(parameters: list[nn.Parameter], kept: Any) -> dict[str, Any]:
        own = [kept.get(parameter, {}) for parameter in parameters]

        def flat(name: str) -> torch.Tensor:
            return torch.cat([state[name].reshape(-1) for state in own])

        found: dict[str, Any] = {name: own[0][name] for name in _SCALARS if name in own[0]}
        found |= {name: flat(name) for name in _FLAT if name in own[0]}
        if "n_pairs" in own[0]:
            pairs = range(own[0]["n_pairs"])
            found |= {name: [flat(f"{name}.{n}") for n in pairs] for name in _LISTS}
            found["ro"] = [own[0][f"ro.{n}"] for n in pairs]
        return found

    @staticmethod
    def _cut(parameters: list[nn.Parameter], made: dict[str, Any], kept: Any) -> None:
        flat: dict[str, torch.Tensor] = {name: made[name] for name in _FLAT if made.get(name) is not None}
        first = {name: made[name] for name in _SCALARS if name in made}
        if "old_dirs" in made:
            first["n_pairs"] = len(made["old_dirs"])
            first |= {f"ro.{n}": value for n, value in enumerate(made["ro"])}
            for name in _LISTS:
                flat |= {f"{name}.{n}": value for n, value in enumerate(made[name])}
        parts = {
            name: value.split([parameter.numel() for parameter in parameters]) for name, value in flat.items()
        }
        for at, parameter in enumerate(parameters):
            state = kept[parameter]
            for name, pieces in parts.items():
                state[name] = pieces[at].view_as(parameter).clone()
            if at == 0:
                state.update(first)


def by_parameter(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """torch's L-BFGS as the one of here; others as they are."""
    if type(optimizer) is torch.optim.LBFGS:
        optimizer.__class__ = LBFGS
    return optimizer
