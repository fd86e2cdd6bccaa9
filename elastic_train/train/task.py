"""Task: the user's description of a training job (model, optimizer, data set, loss)."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from elastic_train.errors import ConfigError
from elastic_train.train.model.collate import stacked
from elastic_train.train.model.leaves import moves_itself

if TYPE_CHECKING:  # it works on shards of a task
    from elastic_train.train.step.gradients import Gradients


EVAL_LOSS = "eval_loss"
"""The task's own loss over the data set of an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What to measure, on what, and every how many steps: a number, "epoch" for those of an epoch, 0 for the
    end of the run alone, where it is measured in any case.

    `metric(output, micro_batch)` returns a summed value and its count, as `Task.loss` does, or a mapping from
    names to such pairs. Without one the task's own loss is measured, as `eval_loss`.

    What is no sum over samples needs all predictions: `keep(output, micro_batch)` returns tensors or lists
    with a row for each sample, or a dict or tuple of these, and `summary(kept)` gets them put together, in
    the order of the data set and on one rank, and returns a mapping from names to numbers.

    `patience` ends the run, with a checkpoint, after so many evaluations in a row that were no better than
    the best one before, by the metric `watch`, "" for the only one; `order` says whether less is better or
    more.

    `micro_size` is how many samples are evaluated together; None: as many as are trained together.
    """

    dataset: Any
    metric: Callable[[Any, Any], Any] | None = None
    every: int | Literal["epoch"] = 0
    keep: Callable[[Any, Any], Any] | None = None
    summary: Callable[[Any], Mapping[str, Any]] | None = None
    patience: int | None = None
    watch: str = ""
    order: Literal["min", "max"] = "min"
    micro_size: int | None = None

    def __post_init__(self) -> None:
        if self.micro_size is not None and (not isinstance(self.micro_size, int) or self.micro_size < 1):
            raise ConfigError(
                field="task.evaluation.micro_size",
                problem=f"must be a number of samples, 1 or more, or None, got {self.micro_size!r}.",
            )
        if self.patience is not None and (not isinstance(self.patience, int) or self.patience < 1):
            raise ConfigError(
                field="task.evaluation.patience",
                problem=f"must be a number of evaluations, 1 or more, or None, got {self.patience!r}.",
            )
        if self.patience is None and (self.watch, self.order) != ("", "min"):
            raise ConfigError(
                field="task.evaluation.watch", problem="watch and order have no effect without patience."
            )
        if self.order not in ("min", "max"):
            raise ConfigError(
                field="task.evaluation.order", problem=f"must be 'min' or 'max', got {self.order!r}."
            )
        if (self.keep is None) != (self.summary is None):
            raise ConfigError(
                field="task.evaluation",
                problem="of keep and summary one is given without the other.",
                remedy="Give both: what to keep of each micro-batch, and what to compute of all of it.",
            )
        if self.every != "epoch" and (not isinstance(self.every, int) or self.every < 0):
            raise ConfigError(
                field="task.evaluation.every",
                problem="must be a whole number of steps, 'epoch', or 0 for the end of the run, got "
                f"{self.every!r}.",
            )
        if self.metric is not None and not callable(self.metric):
            raise ConfigError(
                field="task.evaluation.metric",
                problem=f"must be a function of output and micro-batch, got {type(self.metric).__name__}.",
            )

    def watched(self, names: Collection[str]) -> str:
        """The metric that patience looks at; ConfigError where it is none of these."""
        if self.watch in names or (not self.watch and len(names) == 1):
            return self.watch or next(iter(names))
        raise ConfigError(
            field="task.evaluation.watch",
            problem=f"there is no metric {self.watch!r}." if self.watch else "there are several metrics.",
            remedy=f"There is {', '.join(map(repr, sorted(names)))}.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """An exponential moving average of the trained parameters, moved after each update.

    `average = decay * average + (1 - decay) * parameter`, and a copy after the first update, as torch's
    AveragedModel. Evaluations are of the average, unless `evaluated` is False.
    """

    decay: float
    evaluated: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(
                field="task.average.decay", problem=f"must be at least 0 and below 1, got {self.decay!r}."
            )


Style = Literal["column", "column_gathered", "column_loss", "row"]
"""torch's styles of tensor parallelism, by what is cut: the outputs of a projection, which stay cut or are
gathered, or its inputs, so that the outputs are summed. An embedding cut by "row" holds a part of the
vocabulary, by "column" a part of each vector. "column_loss" is for what the loss is computed from: it stays
cut, a DTensor, and torch's loss_parallel computes cross entropy without gathering it."""

Positions = Literal["alone", "gathered"]
"""What a module needs of the positions: each by itself, or all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a model may be divided, by fqn patterns (`*` matches any part of a name).

    `units` are the modules that are gathered and freed as one when parameters are sharded; without any, every
    member of a ModuleList, ModuleDict or Sequential is one.

    `tensor_parallel` says how linear and embedding modules are cut; what lies between a "column" and a "row"
    module works on a part of the features and must read its sizes off its input. ColwiseParallel() and
    RowwiseParallel() of torch mean the same. `fused` are projections of several outputs in one, with the
    shares of each, as in {"*.qkv": (4, 2, 2)}: every part is cut alone.

    With `sequence`, tp divides what lies outside of projections too, by positions (dim 1). "gathered" modules
    get all positions, as DTensors, and contain the projections that are cut; their "row" modules give a part
    again. Everything else works on a part, and what has parameters there is named as "alone". Dropout gets
    its part of the mask; other random numbers must not be drawn there.

    `attention` are modules in which positions meet, without parameters: cp divides the positions of all
    others, and the heads of these. They are called with query, key and value first, [batch, positions, heads,
    size], give [batch, positions, heads, size], and read how many heads there are off those. Their positions
    are all there, and so is what else the model passes on to them; masks and rotary embeddings belong into
    them. The model's first argument is [batch, positions, ...] and is divided. Everything else works on each
    position by itself; what needs its number calls `elastic_train.position_numbers`. The loss is a sum over
    the positions that are here, of targets from `elastic_train.own_positions`.

    `experts` are modules that stack experts: they own parameters alone, each with a row per expert. They are
    called with rows sorted by expert and the number of rows of each, int64 [experts], give a row for each,
    and read how many experts there are off their parameters: ep leaves them some of all.

    `stages` are the blocks that a pipeline may be cut in front of: all members of one ModuleList or
    Sequential. Naming them says that the model is a chain: the blocks and each part before and after them are
    modules that take one tensor and return one, and may be replaced by the identity. Blocks may take more
    arguments that `forward` passes to each: those of its own that it needs for it on every stage are named in
    `beside`, and come from the data, of which every stage loads its micro-batches then. Modules that make
    such arguments from the shape alone are named in `everywhere`: each stage has them. Where the model
    returns more than a tensor, `hands_on` is the field of it that goes to the next stage.
    """

    units: tuple[str, ...] = ()
    tensor_parallel: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))  # to Style
    fused: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    sequence: Mapping[str, Positions] = field(default_factory=lambda: MappingProxyType({}))
    attention: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    everywhere: tuple[str, ...] = ()
    hands_on: str = ""

    def __post_init__(self) -> None:
        named = {pattern: _named(pattern, style) for pattern, style in self.tensor_parallel.items()}
        object.__setattr__(self, "tensor_parallel", named)


def _named(pattern: str, style: Any) -> str:
    """The name of a style. One of torch's is told by its class, so that nothing is loaded for it."""
    if isinstance(style, str):
        return style
    kind, (layout, *_) = type(style).__name__, getattr(style, "output_layouts", (None,))
    gathered = layout is not None and layout.is_replicate()
    if kind == "RowwiseParallel" and gathered:
        return "row"
    if kind == "ColwiseParallel" and gathered:
        return "column_gathered"
    if kind == "ColwiseParallel" and layout is not None and layout.is_shard(-1):
        return "column" if style.use_local_output else "column_loss"
    raise ConfigError(
        field="task.parallelize",
        problem=f"{kind} of {pattern!r} leaves activations in a layout that is not supported.",
        remedy="Cut projections by ColwiseParallel() and RowwiseParallel(), and name what works on a part of "
        "the positions in Rules(sequence=...).",
    )


class Task:
    """One training problem. Subclass it; `model`, `optimizer`, `dataset` and `loss` must be given."""

    def model(self) -> nn.Module:
        """Build the model. A fresh start has the values that this makes in one process whose generators were
        seeded with the run's seed; otherwise it runs on the meta device, where that gives the same model."""
        raise NotImplementedError

    def init(self, module: nn.Module, fqn: str) -> None:
        """Give values to the tensors that this module itself owns. They are whole and on the device.

        Called once per module that owns any, under a generator seeded with the run's seed and the fqn.
        """
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is None:
            raise ConfigError(
                field="task.init",
                problem=(
                    f"module {fqn or 'the root'!r} ({type(module).__name__}) owns tensors and has no "
                    "reset_parameters()."
                ),
                remedy="Give the module reset_parameters(), or define init(module, fqn) in the task.",
            )
        reset()

    def optimizer(self, named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Build the optimizer over (fqn, parameter) pairs of the whole model."""
        raise NotImplementedError

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """A learning rate scheduler, stepped once per committed step; None for constant rates.

        A pair of a scheduler and the name of a metric of the evaluation: it is stepped after each evaluation,
        by that metric if it is a ReduceLROnPlateau.
        """
        return None

    def dataset(self) -> Any:
        """Numbered samples: anything with `len()` and `[i]`, or a source of elastic_train.data."""
        raise NotImplementedError

    def collate(self, samples: list[Any]) -> Any:
        """A micro-batch of its samples: what `inputs` and `loss` are given, once its tensors were moved.

        By default samples are stacked as torch's DataLoader does it. An epoch's last micro-batch may have
        fewer samples. What it draws is seeded by the step and the micro-batch. It may run in a process of its
        own.
        """
        return stacked(samples)

    def inputs(self, micro_batch: Any) -> Any:
        """What the model is called with: a tensor, a tuple of positional or a mapping of named arguments.

        By default a tensor itself, the first of a tuple, and of a mapping the entries that `forward` names.
        """
        if isinstance(micro_batch, tuple | list) and not moves_itself(micro_batch):
            return micro_batch[0]
        return micro_batch

    def loss(self, output: Any, micro_batch: Any) -> tuple[torch.Tensor, Any]:
        """The summed loss of a micro-batch and what it is a sum over: the number of its tokens or samples.

        Where it takes a third argument, `step`, that is the number of the step, from 1 on.
        """
        raise NotImplementedError

    def metrics(self, output: Any, micro_batch: Any) -> Mapping[str, tuple[Any, Any]]:
        """What to report of each step beside its loss: by name, a sum and what it is a sum over.

        It is called with what the model gave in training, without gradients.
        """
        return {}

    def average(self) -> Average | None:
        """An average of the parameters to keep and to evaluate; None for none."""
        return None

    def gradients(self, gradients: Gradients) -> None:
        """Edit the gradient of the mean loss before the update: clip by value or by group, add noise.

        By default nothing is done. `clip_norm` of the run was applied already.
        """

    def evaluation(self) -> Evaluation | None:
        """What to evaluate while training; None for nothing."""
        return None

    def parallelize(self) -> Rules:
        """Rules for dividing the model; the default fits models made of blocks in a ModuleList."""
        return Rules()


REQUIRED = ("model", "optimizer", "dataset", "loss")
OPTIONAL = (
    *("init", "schedule", "collate", "inputs", "metrics", "average", "gradients"),
    *("evaluation", "parallelize"),
)
LOOKALIKES = {
    **dict.fromkeys(
        ("collate_fn", "collator", "data_collator", "collate_batch", "collate_samples"), "collate"
    ),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_schedule", "configure_schedule"), "schedule"),
    **dict.fromkeys(("eval_dataset", "val_dataset", "val_dataloader", "validation_step"), "evaluation"),
    **dict.fromkeys(
        ("clip_gradients", "configure_gradient_clipping", "on_before_optimizer_step"), "gradients"
    ),
    **dict.fromkeys(("compute_metrics", "training_metrics", "train_metrics"), "metrics"),
    **dict.fromkeys(("ema", "averaged", "configure_ema"), "average"),
    **dict.fromkeys(("init_weights", "initialize_weights"), "init"),
}
"""What other frameworks call the same thing: nothing here would call it, and nobody would notice."""


def takes_step(task: Task) -> bool:
    """Whether its loss wants to know the number of the step."""
    return "step" in inspect.signature(task.loss).parameters


def average_of(task: Task) -> Average | None:
    """ConfigError where the task's method returns something else."""
    made = task.average()
    if made is not None and not isinstance(made, Average):
        raise ConfigError(
            field="task.average", problem=f"returned {type(made).__name__}, not an Average or None."
        )
    return made


def evaluation_of(task: Task) -> Evaluation | None:
    """What the task evaluates; ConfigError where its method returns something else."""
    made = task.evaluation()
    if made is not None and not isinstance(made, Evaluation):
        raise ConfigError(
            field="task.evaluation", problem=f"returned {type(made).__name__}, not an Evaluation or None."
        )
    return made


def check_task(task: Task) -> None:
    """Refuse a task that lacks a method, or whose method looks like a misspelt one."""
    if not isinstance(task, Task):
        raise ConfigError(
            field="task", problem=f"{type(task).__name__} is not a subclass of elastic_train.Task."
        )
    for name in REQUIRED:
        if getattr(type(task), name) is getattr(Task, name):
            raise ConfigError(field=f"task.{name}", problem=f"{type(task).__name__} does not define it.")
    known = (*REQUIRED, *OPTIONAL)
    for name, meant in LOOKALIKES.items():
        if callable(getattr(task, name, None)) and getattr(type(task), meant) is getattr(Task, meant):
            raise ConfigError(
                field=f"task.{name}",
                problem="nothing calls a method of this name.",
                remedy=f"Rename it to {meant}, or let it begin with an underscore if you call it yourself.",
            )
    for cls in type(task).__mro__:
        if cls in (Task, object):
            continue
        own = {name for name, value in vars(cls).items() if callable(value) and not name.startswith("_")}
        # A class that defines the method as well means its other one.
        absent = [name for name in known if name not in own]
        for name in sorted(own - set(known)):
            for near in difflib.get_close_matches(name, absent, n=1, cutoff=0.8):
                raise ConfigError(
                    field=f"task.{name}",
                    problem="nothing calls a method of this name.",
                    remedy=f"Did you mean {near}()? Otherwise rename it or let it begin with an underscore.",
                )
