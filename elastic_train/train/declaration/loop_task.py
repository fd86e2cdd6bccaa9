"""Task made of a user's training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from elastic_train.config import RunSpec
from elastic_train.errors import ConfigError
from elastic_train.train.declaration.declare import Declaration, Loop, declare
from elastic_train.train.model import rng
from elastic_train.train.model.collate import Collate, stacked
from elastic_train.train.model.several_models import Models
from elastic_train.train.task import Task, check_task

if TYPE_CHECKING:
    from elastic_train.train.custom.artifacts import Artifacts
    from elastic_train.train.custom.edits import Edits


class LoopTask(Task):
    """Built anew each time the model is drawn; only the loop itself goes to other processes."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._declared: Declaration | None = None
        self.edits: Edits | None = None  # kept over generations by who runs the loop
        self.artifacts: Artifacts | None = None  # likewise

    def __getstate__(self) -> dict[str, Any]:
        return {"loop": self.loop, "_declared": None, "edits": None, "artifacts": None}

    def model(self) -> nn.Module:
        with rng.preserved():  # what the loop draws beside its models is its own
            self._declared = declare(self.loop)
        return self._declared.models

    def models(self) -> Models:
        """The loop's models once more, to look at: what was declared stays."""
        return declare(self.loop).models

    @property
    def with_init(self) -> frozenset[str]:
        """Models that were declared with an `init`."""
        return frozenset(self._known.inits)

    def init(self, module: nn.Module, fqn: str) -> None:
        own = self._known.inits.get(fqn.split(".")[0])
        if own is None:
            super().init(module, fqn)
        else:
            own(module, fqn.partition(".")[2])

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        assert self._known.optimizer is not None
        return self._known.optimizer

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """By name."""
        return self._known.optimizers

    def dataset(self) -> Any:
        made = self._known.dataset
        makes = isinstance(made, type) or (callable(made) and not hasattr(made, "__getitem__"))
        return made() if makes else made

    @property
    def collates(self) -> Collate:
        """What makes a micro-batch."""
        return self._known.collate or stacked

    def collate(self, samples: list[Any]) -> Any:
        return self.collates(samples)

    def inputs(self, micro_batch: Any) -> Any:
        return (micro_batch,)

    def loss(self, output: Any, micro_batch: Any) -> tuple[torch.Tensor, Any]:
        raise AssertionError("a loop computes its own loss")

    @property
    def _known(self) -> Declaration:
        assert self._declared is not None, "the model is drawn first"
        return self._declared


def task_of(given: Task | Loop) -> Task:
    """A task as it is, once it is checked; a loop as a task."""
    if not isinstance(given, Task) and not isinstance(given, type) and callable(given):
        return LoopTask(given)
    check_task(given)  # type: ignore[arg-type]
    return given  # type: ignore[return-value]


def check_loop_options(spec: RunSpec) -> None:
    """ConfigError for what needs to know a model's forward, or to update in its backward."""
    if spec.optimizer_in_backward:
        raise ConfigError(
            field="optimizer_in_backward", problem="the backward of a loop is its own: write a Task for it."
        )
    if spec.parallelism.divides_the_model:
        raise ConfigError(
            field="parallelism",
            problem="the models of a loop are replicated and sharded (dp_replicate, dp_shard), not cut.",
            remedy="Write a Task to use tp, cp or pp.",
        )
