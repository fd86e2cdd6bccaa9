"""Low-rank adapters: a frozen projection, and a trained one of few parameters beside it.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, section 4.1. The names are those of peft
(`base_layer`, `lora_A`, `lora_B`), which is not needed. Each of the three is a module of its own, so that
tensor parallelism cuts them in the usual styles and a checkpoint knows which of them never change.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from dataclasses import replace

from torch import Tensor, nn

from elastic_train.errors import ConfigError
from elastic_train.train.task import Rules, Style


class Up(nn.Linear):
    """From the low rank to the outputs; zero at first, so that an adapted model begins as its base."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class Adapted(nn.Module):
    """base_layer(x) + scale * lora_B(lora_A(x)); the base is frozen."""

    def __init__(self, base: nn.Linear, *, rank: int, scale: float):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = Up(rank, base.out_features, bias=False)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.scale * self.lora_B(self.lora_A(x))


def adapt(model: nn.Module, targets: Collection[str], *, rank: int, alpha: float) -> nn.Module:
    """Freeze the model, in place, and adapt the linear modules whose last name is one of `targets`.

    The scale is `alpha / rank`. ConfigError where a target is no linear module's name.
    """
    if rank < 1:
        raise ConfigError(field="lora.rank", problem=f"must be positive, got {rank}.")
    model.requires_grad_(False)
    linear = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    names = {path.rpartition(".")[2] for path, _ in linear}
    for target in targets:
        if target not in names:
            raise ConfigError(
                field="lora.targets",
                problem=f"no linear module is named {target!r}.",
                remedy=f"This model has {', '.join(sorted(names)) or 'none'}.",
            )
    for path, module in linear:
        parent, _, name = path.rpartition(".")
        if name in targets:
            setattr(model.get_submodule(parent), name, Adapted(module, rank=rank, scale=alpha / rank))
    return model


def adapted_rules(model: nn.Module, rules: Rules) -> Rules:
    """Rules of the model before it was adapted, as they hold for it now.

    Where a base is cut by its outputs, so is `lora_B`, and where by its inputs, `lora_A`; the other one is
    whole on each rank of tp. What a pattern names is adapted in all blocks or in none.
    """
    found: dict[str, Style] = {}
    modules = dict(model.named_modules())
    for pattern, style in rules.tensor_parallel.items():
        adapted = [
            f for f, m in modules.items() if isinstance(m, Adapted) and fnmatch.fnmatchcase(f, pattern)
        ]
        for fqn in adapted:
            found[f"{fqn}.base_layer"] = style
            found[f"{fqn}.{'lora_A' if style == 'row' else 'lora_B'}"] = style
        if not adapted:
            found[pattern] = style
    return replace(rules, tensor_parallel=found)
