"""Find out which parameters received a gradient on a rank; FSDP2 hides gradients before reducing them.

A branch may be taken on some ranks only. A parameter is without gradient (and so untouched by the optimizer)
only if it is so on every rank; elsewhere what is missing counts as zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from elastic_train.errors import ConfigError
from elastic_train.train.collectives.gradient_reduction import is_sharded
from elastic_train.train.model.build import Blueprint


class Presence:
    """Watches a model's parameters; reset at the start of a step, read before the reduction is used."""

    def __init__(self, blueprint: Blueprint) -> None:
        self._slots = {
            (id(slot.module), slot.name): fqn
            for fqn, slots in blueprint.parameters.slots.items()
            for slot in slots
        }
        self._seen: set[str] = set()
        for module in blueprint.model.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    self._watch(group)

    def reset(self) -> None:
        self._seen.clear()

    def local(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, bool]:
        """For each parameter, whether this rank's own backward reached it."""
        found: dict[str, bool] = {}
        for fqn, parameter in parameters.items():
            hidden = is_sharded(parameter)
            if not hidden and parameter.grad is not None:
                refuse_sparse(fqn, parameter.grad)
            found[fqn] = fqn in self._seen if hidden else parameter.grad is not None
        return found

    def _watch(self, group: Any) -> None:
        """Look at a group's gradients just before it reduces them. torch offers no hook at that point."""
        reduce = group.post_backward

        def post_backward(*unused: Any) -> None:
            for held in group.fsdp_params:
                kept = held.unsharded_accumulated_grad
                fresh = held._unsharded_param.grad if hasattr(held, "_unsharded_param") else None
                found = kept if fresh is None else fresh
                if found is not None:
                    place = held._module_info
                    fqn = self._slots[id(place.module), place.param_name]
                    refuse_sparse(fqn, found)
                    self._seen.add(fqn)
            reduce(*unused)

        group.post_backward = post_backward


def refuse_sparse(fqn: str, gradient: torch.Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise ConfigError(
            field="task.model",
            problem=f"the gradient of {fqn!r} is sparse, and sparse gradients are not reduced.",
            remedy="Build the embedding with sparse=False.",
        )
