"""A config of torchtitan's as a task: its own code builds model, optimizer and schedule."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch
from ray import cloudpickle
from torch import nn
from torch.nn import functional as F

from elastic_train.errors import ConfigError
from elastic_train.integrations.torchtitan.sharding_rules import rules_of
from elastic_train.train.task import Evaluation, Rules, Task

IGNORED = -100
"""The label that torchtitan leaves out of a loss."""
OPTIMIZERS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}


class TitanTask(Task):
    """`config` is looked at, and not changed. A sample of `dataset` is a window of `seq_len + 1` tokens,
    int64, or a pair of tokens and labels, `seq_len` of each.
    """

    def __init__(self, config: Any, dataset: Any, evaluation: Evaluation | None) -> None:
        self.prepared = prepared(config)
        self._dataset, self._evaluation = dataset, evaluation

    def __getstate__(self) -> dict[str, Any]:
        """Configs hold functions that were made in functions, which plain pickles refuse."""
        prepared = cloudpickle.dumps(self.prepared)  # pyright: ignore[reportPrivateImportUsage]
        return vars(self) | {"prepared": prepared}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, prepared=cloudpickle.loads(state["prepared"]))

    def model(self) -> nn.Module:
        with torch.device("meta"):
            model = self.prepared.model_spec.model.build()
        model.to_empty(device=torch.get_default_device())
        with torch.no_grad():
            model.init_states()
        own = model.tok_embeddings  # which looks for torchtitan's mesh where its weight is divided
        model.tok_embeddings = nn.Embedding(own.num_embeddings, own.embedding_dim, _weight=own.weight)
        return model

    def optimizer(self, named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Each parameter is of the first group whose pattern is found in its name."""
        said = self.prepared.optimizer
        left = {name: parameter for name, parameter in named_params if parameter.requires_grad}
        how = {"fused": said.implementation == "fused", "foreach": said.implementation == "foreach"}
        groups: list[dict[str, Any]] = []
        for group in said.param_groups:
            taken = [name for name in left if re.search(group.pattern, name)]
            if not taken:
                raise ConfigError(
                    field="config.optimizer.param_groups",
                    problem=f"the pattern {group.pattern!r} is found in no parameter's name.",
                )
            groups.append({"params": [left.pop(n) for n in taken], **how, **group.optimizer_kwargs})
        if left:
            raise ConfigError(
                field="config.optimizer.param_groups",
                problem=f"{next(iter(left))!r} is of no group.",
                remedy="Let the last pattern be '.*'.",
            )
        return OPTIMIZERS[said.param_groups[0].optimizer_name](groups)

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        config = self.prepared
        made = config.lr_scheduler.build(optimizers=[optimizer], training_steps=config.training.steps)
        return made.schedulers[0]

    def dataset(self) -> Any:
        return self._dataset

    def inputs(self, micro_batch: Any) -> torch.Tensor:
        return _tokens_and_labels(micro_batch)[0]

    def loss(self, output: torch.Tensor, micro_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross entropy summed over the labels that count, as torchtitan's before it divides."""
        labels = _tokens_and_labels(micro_batch)[1].flatten()
        total = F.cross_entropy(output.flatten(0, 1).float(), labels, reduction="sum", ignore_index=IGNORED)
        return total, (labels != IGNORED).sum()

    def evaluation(self) -> Evaluation | None:
        return self._evaluation

    def parallelize(self) -> Rules:
        with torch.device("meta"):
            return rules_of(self.prepared.model_spec.model.build())


def prepared(config: Any) -> Any:
    """A copy whose model knows the sequence length and how it is cut, and attends by torch's own kernel.

    Windows are whole and attention in them is causal: what torchtitan computes by masks that it makes outside
    of the model from the tokens' positions.
    """
    config = copy.deepcopy(config)
    plain = import_module("torchtitan.models.common.attention").ScaledDotProductAttention
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = plain.Config()
    config.model_spec.model.update_from_config(config=config)
    return config


def _tokens_and_labels(micro_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(micro_batch, torch.Tensor):
        return micro_batch[:, :-1], micro_batch[:, 1:]
    tokens, labels = micro_batch
    return tokens, labels
