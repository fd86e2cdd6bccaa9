"""Rules from the sharding configs by which torchtitan cuts a model over its own tensor-parallel mesh."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from torch import nn

from elastic_train.errors import ConfigError
from elastic_train.train.task import Positions, Rules, Style

HEAD = "lm_head"
"""What the loss is computed from."""
GATHERED = ("attention", "feed_forward", HEAD)
"""What holds projections that are cut, and needs all positions."""
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def rules_of(model: nn.Module) -> Rules:
    """How a model of torchtitan's may be divided. Its modules carry what `update_from_config` said of them.

    Positions are divided where its config has sequence parallelism. ConfigError for a module that is cut in
    a way that has no name here. Without stages: its blocks are in a ModuleDict, which pipelines don't cut.
    """
    cut: dict[str, Style] = {}
    sequence: dict[str, Positions] = {}
    divided = _positions_are_divided(model)
    for fqn, module in model.named_modules():
        pattern = _NUMBER.sub(".*", fqn)
        if isinstance(module, nn.Linear | nn.Embedding):
            style = _style(module, fqn)
            if style is not None:
                cut[pattern] = style
        elif divided and next(module.parameters(recurse=False), None) is not None:
            sequence[pattern] = "alone"
        if divided and fqn.rpartition(".")[2] in GATHERED:
            sequence[pattern] = "gathered"
    return Rules(tensor_parallel=cut, sequence=sequence, units=("layers.*",))


def _style(module: nn.Linear | nn.Embedding, fqn: str) -> Style | None:
    """None where each rank has it whole."""
    dim = _dim_over_tp(module, fqn)
    if dim is None:
        return None
    if isinstance(module, nn.Embedding):
        return "row" if dim == 0 else "column"
    if dim == 1:
        return "row"
    return "column_loss" if fqn == HEAD else "column"


def _dim_over_tp(module: nn.Module, fqn: str) -> int | None:
    """The dim of its weight that torchtitan's tp divides."""
    said = getattr(module, "_sharding_config", None)
    layout = said.state_shardings.get("weight") if said is not None else None
    if layout is None:
        return None
    placed = layout.axis_types.get(_tp())
    dim = getattr(placed, "dim", None)
    if dim is None:
        return None
    if dim not in (0, 1):
        raise ConfigError(
            field=f"config.model_spec.model.{fqn}",
            problem=f"its weight is cut along dim {dim} over tp, which has no style here.",
            remedy="Use Parallelism(tp=1).",
        )
    return dim


def _positions_are_divided(model: nn.Module) -> bool:
    """Whether the residual stream, which the first norm gets, is divided over tp by positions."""
    norm = getattr(model, "norm", None)
    said = getattr(norm, "_sharding_config", None)
    layout = (said.in_src_shardings or {}).get("input") if said is not None else None
    return layout is not None and _tp() in str(layout.partition_spec)


def _tp() -> Any:
    return import_module("torchtitan.distributed.parallel_dims").MeshAxisName.TP
