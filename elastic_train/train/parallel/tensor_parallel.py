"""Cut linear and embedding modules over the ranks of the tp axis, in torch's own parallel styles.

Activations outside of a cut region are plain tensors, the same on every tp rank, and so are gradients of
parameters that are not cut. What a model does within a region must not depend on which features are there.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from elastic_train.errors import ConfigError
from elastic_train.geometry.fused import Run, fused_runs
from elastic_train.train.collectives.gradient_reduction import local_gradient
from elastic_train.train.collectives.mesh_position import MeshPosition
from elastic_train.train.model.build import Blueprint, put, tensors
from elastic_train.train.model.dropout import Slice
from elastic_train.train.model.positions import POSITIONS
from elastic_train.train.model.rng import drawn_so_far
from elastic_train.train.model.tensor_names import canonical
from elastic_train.train.parallel.sequence_parallel import alone, check_positions
from elastic_train.train.parallel.tp_widths import widths_of
from elastic_train.train.task import Rules, Style

ALIKE = 1e-3
"""Relative difference of two norms that rounding explains, in bfloat16 too."""

STYLES = ("column", "column_gathered", "column_loss", "row")


class Regions:
    """Where activations are cut, in the order of execution: no random number may be drawn there.

    A mask drawn on a part of the features cannot be that of the whole. `around` seeds the generator anew, so
    that this counts as no draw.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        loss: bool = False,
        alone: frozenset[str] = frozenset(),
        part: Slice | None = None,
    ) -> None:
        """`loss`: what the loss is computed from is cut. Gradients of the parameters `alone` are to be summed
        over tp, and `part` says which positions are here, where positions are divided."""
        self.loss, self.alone, self.part = loss, alone, part
        self._device = device
        self._state: torch.Tensor | None = None
        self._opened = ""

    def reset(self, *_: Any) -> None:
        self._state = None

    def open(self, fqn: str) -> None:
        if self._state is None:
            self._state, self._opened = self._now(), fqn

    def close(self, fqn: str) -> None:
        self._check(fqn)
        self._state = None

    def around(self, seeding: Callable[[], None], fqn: str) -> None:
        """Seed the generator, inside of a region or not."""
        self._check(fqn)
        seeding()
        if self._state is not None:
            self._state = self._now()

    def _check(self, fqn: str) -> None:
        if self._state is not None and not torch.equal(self._state, self._now()):
            raise ConfigError(
                field="parallelism.tp",
                problem=f"random numbers are drawn between {self._opened!r} and {fqn!r}, where an activation "
                "is cut over the tp ranks: they would depend on the plan.",
                remedy="Move the dropout behind the row-parallel module, or use Parallelism(tp=1).",
            )

    def _now(self) -> torch.Tensor:
        return drawn_so_far(self._device)


def cut_tensors(
    blueprint: Blueprint,
    rules: Rules,
    chosen: Mapping[str, Style],
    mesh: DeviceMesh,
    device: torch.device,
    *,
    spread: bool = False,
) -> tuple[Blueprint, Regions]:
    """Divide the meta model in place over a mesh of one axis; nothing is communicated.

    `chosen` is what `styles` found in the whole model. With `spread`, positions are divided outside of
    projections: `cut_positions` was called before.
    """
    regions = Regions(
        device,
        loss="column_loss" in chosen.values(),
        alone=alone(blueprint, rules) if spread else frozenset(),
        part=Slice(mesh.get_local_rank(), mesh.size()) if spread else None,
    )
    blueprint = replace(blueprint, fused=_fused(blueprint, rules, mesh.size()))
    blueprint.model.register_forward_pre_hook(regions.reset)
    for path, module in (*blueprint.model.named_modules(), *blueprint.givers):
        fqn = canonical(path)
        if fqn not in chosen or isinstance(module, nn.Identity):
            continue
        if spread and chosen[fqn] == "row":
            check_positions(module, fqn, mesh.size())
        parallelize_module(module, mesh, _torch_style(module, chosen[fqn], spread), src_data_rank=None)
        if chosen[fqn] == "column":
            module.register_forward_hook(lambda *_, fqn=fqn: regions.open(fqn))
        elif chosen[fqn] == "row" and isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda *_, fqn=fqn: regions.close(fqn))
    for fqn, slots in blueprint.parameters.slots.items():
        # torch makes a new parameter for each module: tie again what was tied.
        values = [getattr(slot.module, slot.name) for slot in slots]
        if len({v.placements if isinstance(v, DTensor) else None for v in values}) > 1:
            raise ConfigError(
                field="task.parallelize",
                problem=f"the modules that share {fqn!r} are cut differently.",
                remedy="Cut an embedding by 'row' where the projection that shares its weight is cut by "
                "'column_gathered'.",
            )
        put(blueprint.parameters, fqn, values[0])
    return blueprint, regions


def styles(model: nn.Module, rules: Rules, ranks: int) -> dict[str, Style]:
    """How each module of the whole model is cut, by fqn; ConfigError where `ranks` cannot cut it."""
    if not rules.tensor_parallel:
        raise ConfigError(
            field="parallelism.tp",
            problem=f"nothing says how {type(model).__name__} may be cut over {ranks} ranks.",
            remedy="Name its projections with Rules(tensor_parallel=...) in parallelize(), or use "
            "Parallelism(tp=1).",
        )
    _check_heads(model, ranks)
    modules = [(canonical(path), module) for path, module in model.named_modules()]
    found: dict[str, Style] = {}
    for pattern, style in rules.tensor_parallel.items():
        if style not in STYLES:
            raise ConfigError(
                field="task.parallelize", problem=f"{style!r} of {pattern!r} is none of {', '.join(STYLES)}."
            )
        matched = [(fqn, module) for fqn, module in modules if fnmatch.fnmatchcase(fqn, pattern)]
        if not matched:
            raise ConfigError(field="task.parallelize", problem=f"no module matches {pattern!r}.")
        for fqn, module in matched:
            if not isinstance(module, nn.Linear | nn.Embedding):
                raise ConfigError(
                    field="task.parallelize",
                    problem=f"{fqn!r} is a {type(module).__name__}; linear and embedding modules can be cut.",
                )
            found[fqn] = style
    for pattern in rules.fused:
        if not any(fnmatch.fnmatchcase(f, pattern) and style == "column" for f, style in found.items()):
            raise ConfigError(
                field="task.parallelize",
                problem=f"no module that is cut by 'column' matches the fused {pattern!r}.",
            )
    return found


def check_alike(parameters: Mapping[str, nn.Parameter], place: MeshPosition) -> None:
    """ConfigError where the gradient of a parameter that is not cut differs between the tp ranks.

    It does where the parameter is applied to a cut activation: each rank sees a part of its gradient.
    """
    if place.tensor is None:
        return
    names = [f for f, p in parameters.items() if p.grad is not None and _whole_over_tp(p)]
    if not names:
        return
    norms = [torch.linalg.vector_norm(local_gradient(parameters[fqn]), dtype=torch.float64) for fqn in names]
    both = torch.stack([*norms, *(-norm for norm in norms)])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=place.tensor)
    most, least = both[: len(names)], -both[len(names) :]
    for fqn, high, low in zip(names, most.tolist(), least.tolist(), strict=True):
        if high - low > ALIKE * high:
            raise ConfigError(
                field="parallelism.tp",
                problem=f"the gradient of {fqn!r} differs between the tp ranks, which hold all of it: it is "
                "applied where activations are cut.",
                remedy="Move it out from between the column- and row-parallel modules, or use "
                "Parallelism(tp=1).",
            )


def _whole_over_tp(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor):
        return True
    names = parameter.device_mesh.mesh_dim_names or ()
    return "tp" not in names or isinstance(parameter.placements[names.index("tp")], Replicate)


def _fused(blueprint: Blueprint, rules: Rules, ranks: int) -> dict[str, tuple[Run, ...]]:
    """By fqn, the order of rows in which tp cuts the parts of fused projections."""
    found: dict[str, tuple[Run, ...]] = {}
    for fqn, tensor in tensors(blueprint.parameters).items():
        module = fqn.rpartition(".")[0]
        for pattern, shares in rules.fused.items():
            if not fnmatch.fnmatchcase(module, pattern):
                continue
            unit, rest = divmod(tensor.shape[0], sum(shares))
            if rest or any(share * unit % ranks for share in shares):
                raise ConfigError(
                    field="parallelism.tp",
                    problem=f"{ranks} ranks do not divide each part of {fqn!r}, {tensor.shape[0]} rows in "
                    f"shares of {', '.join(map(str, shares))}.",
                )
            found[fqn] = fused_runs([share * unit for share in shares], ranks)
    return found


def _check_heads(model: nn.Module, ranks: int) -> None:
    widths = widths_of(model)
    for what, size in (("heads", widths.heads), ("key and value heads", widths.kv_heads)):
        if size and size % ranks:
            legal = [n for n in range(1, size + 1) if size % n == 0]
            raise ConfigError(
                field="parallelism.tp",
                problem=f"{ranks} ranks do not divide the model's {size} {what}.",
                remedy=f"Legal are {', '.join(map(str, legal))}.",
            )


def _torch_style(module: nn.Module, style: Style, spread: bool) -> ParallelStyle:
    if style == "row":
        summed = Shard(POSITIONS) if spread else Replicate()
        if isinstance(module, nn.Embedding):
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=summed)
        return _Row(output_layouts=summed)
    return ColwiseParallel(
        output_layouts=Replicate() if style == "column_gathered" else Shard(-1),
        use_local_output=style != "column_loss",
    )


class _Row(RowwiseParallel):
    """torch's, for inputs that do not divide evenly too: their whole width is that of the module."""

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> DTensor:
        local = inputs[0]
        assert isinstance(mod, nn.Linear)
        shape = torch.Size((*local.shape[:-1], mod.in_features))
        return DTensor.from_local(
            local,
            device_mesh,
            (Shard(local.ndim - 1),),
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
