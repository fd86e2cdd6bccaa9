"""Models of Hugging Face transformers: rules from the plans that they carry, weights in and out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn

from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.errors import ConfigError, TensorMismatch
from elastic_train.train.parallel.pipeline_stages import Elsewhere
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
    """How the model's own `tp_plan` and `pp_plan` divide it; not along an axis that it has no plan for.

    Nor over tp with styles of mixtures of experts and of norms inside attention, nor along pp where its
    forward does more than to call one module after the other.
    """
    rules, plan = _stages(model), getattr(model, "tp_plan", None) or {}
    if not all(style in STYLES for style in plan.values()):
        return rules
    return replace(rules, tensor_parallel={pattern: STYLES[style] for pattern, style in plan.items()})


def _stages(model: nn.Module) -> Rules:
    """The blocks of a `pp_plan`, which has the modules that hidden states pass through, in their order."""
    plan = getattr(model, "pp_plan", None) or {}
    modules = dict(model.named_modules())
    blocks = [name for name in plan if isinstance(modules.get(name), nn.ModuleList)]
    if len(blocks) != 1:
        return Rules()
    around, _, _ = blocks[0].rpartition(".")
    everywhere = tuple(
        name for inner, _ in modules[around].named_children() if (name := f"{around}.{inner}") not in plan
    )
    passed = [name for name in plan if name in modules and name != blocks[0]]
    each = [f"{blocks[0]}.{name}" for name, _ in modules[blocks[0]].named_children()]
    weighty = any(next(modules[name].parameters(), None) is not None for name in everywhere)
    if weighty or not _passes_on(model, (*passed, *each, *everywhere)):
        return Rules()
    return Rules(stages=(f"{blocks[0]}.*",), everywhere=everywhere, hands_on="logits")


def _passes_on(model: nn.Module, parts: Collection[str]) -> bool:
    """Whether the model is the identity once its parts are: nothing is computed between them.

    Some scale the embeddings outside of a module, say, and every stage would do that again.
    """
    modules = {part: model.get_submodule(part) for part in parts}
    hidden = torch.linspace(-1.0, 1.0, 12).view(1, 3, 4)
    for part in parts:
        model.set_submodule(part, Elsewhere())
    try:
        return torch.equal(model(hidden).logits, hidden)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError):
        return False
    finally:
        for part, module in modules.items():
            model.set_submodule(part, module)


def save_pretrained(
    checkpoint: str, model: nn.Module, directory: str | Path, *, tokenizer: Any = None
) -> None:
    """Write a run's newest checkpoint, or one checkpoint's directory, as transformers writes a model.

    `model` is one of transformers, as the job's own `model()` makes it; it is given the checkpoint's values.
    `directory` then has its weights and configuration, and the tokenizer if one is given. TensorMismatch
    where the checkpoint is of another model.
    """
    held = open_checkpoint(checkpoint)
    with torch.no_grad():
        for state, named in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
            for fqn, tensor in named:
                info = held.info(fqn, state)
                if tuple(info.shape) != tuple(tensor.shape):
                    raise TensorMismatch(
                        url=held.url,
                        problem=f"{fqn} is {list(info.shape)} there, {list(tensor.shape)} in the model.",
                    )
                values = np.ascontiguousarray(held.read(fqn, state)).reshape(-1)
                bits = torch.from_numpy(values.view(np.uint8).copy())
                tensor.copy_(bits.view(getattr(torch, info.dtype)).reshape(tensor.shape))
    model.save_pretrained(directory)  # type: ignore[operator]
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def load_base(model: nn.Module, directory: str, *, tied: Collection[str] = ()) -> None:
    """Give an adapted model's base its weights from a directory's safetensors, but for `tied` names, whose
    value comes from another module. Call it in `Task.model`: without memory nothing is read.

    ConfigError where the directory lacks a tensor of the base.
    """
    files = files_of(directory)
    for fqn, tensor in model.named_parameters():
        stored = fqn.replace(".base_layer.", ".")
        if ".lora_A." in fqn or ".lora_B." in fqn or tensor.is_meta:
            continue
        if stored not in files:
            if stored in tied:
                continue
            raise ConfigError(
                field="config",
                problem=f"{directory} has no tensor {stored!r}, which the model needs.",
                remedy="Give a directory that holds this model whole, in safetensors files.",
            )
        with safe_open(files[stored], framework="pt") as file, torch.no_grad():
            tensor.copy_(file.get_tensor(stored))


@cache
def files_of(directory: str) -> Mapping[str, Path]:
    """Which file of a directory holds a tensor, by the tensor's name."""
    found: dict[str, Path] = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return MappingProxyType(found)
