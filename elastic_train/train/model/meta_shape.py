"""Parameter shapes and sizes of a task's model for the planner, from a build on the meta device."""

from __future__ import annotations

import torch

from elastic_train.config import RunSpec
from elastic_train.planner.model_shape import ModelShape, TensorShape
from elastic_train.train.model.build import draw, tensors
from elastic_train.train.model.optimizer import describe
from elastic_train.train.task import Task, average_of


def model_shape(task: Task, spec: RunSpec) -> ModelShape:
    """Tensors, optimizer slots and micro-batch of the task. Raises what the task's own code raises."""
    blueprint = draw(task, spec.precision, spec.batch.seed)
    parameters = tensors(blueprint.parameters)
    optimizer, _ = describe(task, parameters)  # pyright: ignore[reportArgumentType]
    rows = [
        TensorShape(
            fqn=fqn,
            shape=tuple(tensor.shape),
            item_bytes=tensor.element_size(),
            trainable=tensor.requires_grad,
        )
        for fqn, tensor in parameters.items()
    ]
    rows += [
        TensorShape(
            fqn=fqn,
            shape=tuple(tensor.shape),
            item_bytes=tensor.element_size(),
            trainable=False,
            sharded=False,
        )
        for fqn, tensor in tensors(blueprint.buffers).items()
    ]
    return ModelShape(
        tensors=tuple(rows),
        slots=_slots(optimizer) + (average_of(task) is not None),
        slot_bytes=8 if spec.precision == "fp64" else 4,
        micro_size=spec.batch.micro_size,
    )


def _slots(optimizer: torch.optim.Optimizer) -> int:
    """State tensors per parameter, as far as the hyperparameters tell; two, as Adam's, where they don't."""
    defaults = optimizer.defaults
    if "betas" in defaults:
        return 2 + bool(defaults.get("amsgrad"))
    if "momentum" in defaults:
        squares = "alpha" in defaults  # RMSprop
        return squares + bool(defaults["momentum"]) + bool(defaults.get("centered"))
    return 1 if "lr_decay" in defaults else 2
