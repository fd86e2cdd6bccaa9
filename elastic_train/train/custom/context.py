"""Context object of a user's training loop: declares models, optimizers and state, and yields steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

T = TypeVar("T")
Metric = Callable[[Any], Mapping[str, tuple[Any, Any]]]
"""Of a micro-batch: by name, a sum and its count."""


class Update(Protocol):
    """What the ranks agreed on: the mean loss over the global batch, and the norm of its gradient."""

    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def skipped(self) -> bool:
        """The gradient was not finite: nothing was changed."""
        ...


class Step(Protocol):
    """A step that is under way, and its outcome once its block was left."""

    def backward(self, loss: torch.Tensor, count: Any = None, *, retain_graph: bool = False) -> None:
        """Add the gradient of a micro-batch's loss.

        Without a count the loss is a mean over the micro-batch. With one it is a sum, and the count what it
        is a sum over. The gradient is that of the mean over the global batch, whatever the plan.
        """
        ...

    def update(self, optimizer: torch.optim.Optimizer) -> Update:
        """Sum this optimizer's gradients over the ranks and apply them now, inside the step.

        Those of the optimizers that aren't named this way are applied when the block ends.
        """
        ...

    def closure(self, optimizer: torch.optim.Optimizer, compute: Callable[[], object]) -> Update:
        """Let L-BFGS compute loss and gradient as often as it likes: `compute()` iterates the batch and calls
        `backward`. It works on the mean over the global batch, under replication. The outcome is of the first
        time.
        """
        ...

    def agree(self, number: int | None) -> int:
        """A number that all ranks with micro-batches say, told to those that have none and say None; 0 where
        nobody says one. All ranks call it as often. ConfigError where they differ.
        """
        ...

    def measure(self, **metrics: tuple[Any, Any]) -> None:
        """Add to metrics that the step was begun with: by name, a sum and its count."""
        ...

    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def skipped(self) -> bool: ...
    @property
    def metrics(self) -> Mapping[str, float]:
        """Means over the global batch."""
        ...


class Batch(Protocol):
    """The samples of a step. Each time it is iterated, it gives this rank's micro-batches.

    How many that are depends on the plan. Iterate it to its end.
    """

    step: int
    """From 1 on."""
    epoch: int
    """From 0 on."""
    steps_per_epoch: int

    @property
    def index(self) -> int:
        """Of the micro-batch under way in the global batch, from 0 on: the same whichever rank has it."""
        ...

    def __iter__(self) -> Iterator[Any]: ...


class Carried(Protocol):
    """State of each place of the global batch. `value` are the rows of all places, as the last step left
    them; it may be assigned between steps, as where an epoch begins."""

    value: torch.Tensor

    def get(self) -> torch.Tensor:
        """The rows of this micro-batch's samples, as the last step left them."""
        ...

    def set(self, rows: torch.Tensor) -> None:
        """Those for the next step. Nothing is differentiated through them; a skipped step leaves them."""
        ...


class Context(Protocol):
    """State is declared before the first batch, under the same names each time the loop is entered.

    `rank` and `world_size` are for logs: what a loop computes must not depend on them.
    """

    rank: int
    world_size: int
    device: torch.device
    max_steps: int

    @property
    def at(self) -> int:
        """Steps that are committed."""
        ...

    def model(
        self,
        name: str,
        build: Callable[[], nn.Module],
        *,
        init: Callable[[nn.Module, str], None] | None = None,
    ) -> Any:
        """A model, divided under the current plan, with the values that it has at this step.

        At a fresh start it has the values that `build` makes in one process under the run's seed. With
        `init(module, fqn)` each module's own tensors get theirs from it instead, one module after the other.
        """
        ...

    def optimizer(self, name: str, make: Callable[..., Any], model: Any, **settings: Any) -> Any:
        """`make(parameters, **settings)`, over a model's parameters or over parameter groups."""
        ...

    def register(self, name: str, thing: T) -> T:
        """State of the loop's own: anything with `state_dict` and `load_state_dict`, equal on all ranks."""
        ...

    def carry(self, name: str, value: torch.Tensor, *, dim: int = 0) -> Carried:
        """State of the places of the global batch, from step to step: a row of `value` along `dim` for each
        of its `global_size` samples, in the order of the batch. It is in checkpoints, and goes with its place
        to whichever rank computes it.

        For columns of text that go on from step to step: with `Batch(shuffle=False)` and a data set whose
        sample `k * global_size + c` is the k-th piece of column c.
        """
        ...

    def batches(self, dataset: Any, *, collate: Callable[[list[Any]], Any] | None = None) -> Iterator[Batch]:
        """The batches from this step on to the last. `dataset` may be a function that makes it.

        `collate` makes a micro-batch of a list of samples, which may be fewer in an epoch's last one.
        """
        ...

    def step(self, metrics: tuple[str, ...] | None = ()) -> AbstractContextManager[Step]:
        """One committed step: it is there for all ranks, or for none, when the block was left.

        `metrics` are the names that `measure` may be given; None: any, on which the ranks agree as they come.
        """
        ...

    def evaluate(self, dataset: Any, metric: Metric) -> dict[str, float]:
        """Means of metrics over a data set, each sample once, the same under every plan.

        Models are in evaluation mode and without gradients meanwhile. It stands before a step or after the
        last one, so that it is measured anew where it was broken off.
        """
        ...

    @property
    def artifacts(self) -> Path:
        """A directory for files of the last step: images, samples, tables. Before the next step they are in
        the run's storage, under `artifacts/step-<number>`, as rank 0 wrote them; a step that is run again has
        the same. At most 1000 files and 256 MiB a step; those of the newest 1000 steps stay.
        """
        ...

    def report(self, **metrics: float) -> None:
        """Metrics of the last step, for callbacks, the history, and the choice of the best checkpoint."""
        ...
