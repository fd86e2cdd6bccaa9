"""Which parameters require a gradient now, also of those that FSDP2 keeps twice: as a shard, and gathered.

A job's code sees the one or the other, by whether its module is gathered, and FSDP2 takes over what is set on
the one into the other only once. Before each forward of a unit both are made what was set last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from elastic_train.errors import ConfigError
from elastic_train.train.model.build import Blueprint


class TrainedParts:
    """Of one generation's shards."""

    def __init__(self, blueprint: Blueprint, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._known = {fqn: p.requires_grad for fqn, p in parameters.items()}
        self._gathered: dict[str, Any] = {}
        slots = {
            (id(slot.module), slot.name): fqn
            for fqn, slots in blueprint.parameters.slots.items()
            for slot in slots
        }
        for module in blueprint.model.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    held = {
                        slots[id(p._module_info.module), p._module_info.param_name]: p
                        for p in group.fsdp_params
                    }
                    self._gathered |= held
                    self._watch(group, tuple(held))

    @property
    def sharded(self) -> bool:
        """Whether a parameter is kept twice, so that ranks reduce gradients in the midst of a backward."""
        return bool(self._gathered)

    def now(self) -> dict[str, bool]:
        """By name, in the order of the parameters."""
        for fqn in self._gathered:
            self._settle(fqn)
        for fqn, parameter in self._parameters.items():
            if fqn not in self._gathered:
                self._known[fqn] = parameter.requires_grad
        return dict(self._known)

    def put(self, flags: Mapping[str, bool]) -> None:
        for fqn, flag in flags.items():
            self._set(fqn, flag)

    def check_equal(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """ConfigError, on all ranks of the group, where they would not reduce the same gradients."""
        flags = self.now()
        table = torch.tensor([flags[fqn] for fqn in self._gathered], dtype=torch.float32, device=device)
        dist.all_reduce(table, group=group)
        size = dist.get_world_size(group)
        odd = [fqn for fqn, n in zip(self._gathered, table.tolist(), strict=True) if n not in (0, size)]
        if odd:
            raise unlike(odd[0])

    # -- private

    def _watch(self, group: Any, names: tuple[str, ...]) -> None:
        """Just before a unit is gathered. torch offers no hook at that point."""
        forward = group.pre_forward

        def pre_forward(*given: Any) -> Any:
            for fqn in names:
                self._settle(fqn)
            return forward(*given)

        group.pre_forward = pre_forward

    def _settle(self, fqn: str) -> None:
        twin = getattr(self._gathered[fqn], "_unsharded_param", None)
        shard, known = self._parameters[fqn].requires_grad, self._known[fqn]
        flag = shard if twin is None or shard != known else twin.requires_grad
        if flag != shard or (twin is not None and flag != twin.requires_grad) or flag != known:
            self._set(fqn, flag)

    def _set(self, fqn: str, flag: bool) -> None:
        self._known[fqn] = flag
        self._parameters[fqn].requires_grad_(flag)
        twin = getattr(self._gathered.get(fqn), "_unsharded_param", None)
        if twin is not None:
            twin.requires_grad_(flag)


def unlike(fqn: str) -> ConfigError:
    return ConfigError(
        field=f"model.{fqn}",
        problem="requires_grad is not the same on all ranks: it was changed by chance or by samples.",
        remedy="Freeze by the number of the step, or leave it trainable and its gradient out, by detach(), "
        "or allow the run one worker, with ScalingConfig(num_workers=1).",
    )
