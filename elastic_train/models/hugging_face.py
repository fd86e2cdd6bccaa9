"""Models of Hugging Face transformers: rules from the plans that they carry, and their initial values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from safetensors import safe_open
from torch import nn

from elastic_train.errors import ConfigError
from elastic_train.models.lora import Up
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


def initialise(module: nn.Module, fqn: str) -> None:
    """As transformers does it for most models: normal weights, zero biases, scales of one."""
    if isinstance(module, Up):
        return module.reset_parameters()
    if dict(module.named_buffers(recurse=False)):  # rotary frequencies, made by their module
        for name, value in type(module)(module.config).named_buffers(recurse=False):
            getattr(module, name).copy_(value)
    for name, tensor in module.named_parameters(recurse=False):
        fill = nn.init.ones_ if "norm" in fqn.lower() and name == "weight" else nn.init.zeros_
        nn.init.normal_(tensor, std=0.02) if tensor.ndim > 1 else fill(tensor)
    return None


def initialise_from(directory: str, module: nn.Module, fqn: str, *, tied: Collection[str] = ()) -> None:
    """The module's own parameters from a directory's safetensors; those of an adapter are new.

    For a model whose frozen base is there and whose adapters are nowhere yet. Of `tied` names the value comes
    from another module. ConfigError where the directory lacks a tensor of the base.
    """
    initialise(module, fqn)
    if fqn.endswith((".lora_A", ".lora_B")):
        return
    files = files_of(directory)
    for own, tensor in module.named_parameters(recurse=False):
        stored = f"{fqn.removesuffix('.base_layer')}.{own}"
        if stored not in files:
            if stored in tied:
                continue
            raise ConfigError(
                field="config",
                problem=f"{directory} has no tensor {stored!r}, which the model needs.",
                remedy="Give a directory that holds this model whole, in safetensors files.",
            )
        with safe_open(files[stored], framework="pt") as file:
            tensor.copy_(file.get_tensor(stored))


@cache
def files_of(directory: str) -> Mapping[str, Path]:
    """Which file of a directory holds a tensor, by the tensor's name."""
    found: dict[str, Path] = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return MappingProxyType(found)
