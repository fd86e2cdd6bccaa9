"""Rules for models of Hugging Face transformers, from the plans that they carry."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from elastic_train.train.task import Rules, Style

STYLES: Mapping[str, Style] = MappingProxyType(
    {
        "colwise": "column",
        "rowwise": "row",
        "colwise_gather_output": "column_gathered",
        "colwise_rep": "column_gathered",  # its name before transformers 5
        "embedding_rowwise": "row",
    }
)


def rules_of(model: nn.Module) -> Rules:
    """How the model's own `tp_plan` cuts it over tp; nothing where it has none, or one with other styles.

    Those are the ones of mixtures of experts and of norms inside attention: such models are divided along the
    data axes alone. So are all of them along pp: their blocks take more than one tensor.
    """
    plan = getattr(model, "tp_plan", None) or {}
    if not all(style in STYLES for style in plan.values()):
        return Rules()
    return Rules(tensor_parallel={pattern: STYLES[style] for pattern, style in plan.items()})
