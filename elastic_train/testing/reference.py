"""A plain training loop in one process, in float64: what every plan has to compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic_train.config import RunSpec
from elastic_train.data.order import SampleOrder
from elastic_train.train.dataset import collated
from elastic_train.train.model.collate import caller, placed
from elastic_train.train.model.rng import Randomness
from elastic_train.train.task import Task, takes_step

State = Mapping[tuple[str, str], np.ndarray]
"""Whole tensors by name and state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Loss and gradient norm of each step; parameters and optimizer state after the last."""

    losses: list[float]
    norms: list[float]
    state: State


def reference(
    task: Task,
    run: RunSpec,
    initial: State,
    edit: Callable[[Mapping[str, nn.Parameter], int], None] | None = None,
) -> Expected:
    """Train from the parameters in `initial`; buffers are initialised by the task.

    `edit` is given the named parameters with their mean, clipped gradients, and the step.
    """
    model, optimizer, schedule = _built(task, initial)
    named, call = dict(model.named_parameters()), caller(model)
    data, randomness = task.dataset(), Randomness(model, seed=run.batch.seed)
    order, combine = SampleOrder(len(data), run.batch), collated(task, run.batch.seed)
    losses: list[float] = []
    norms: list[float] = []
    for step in range(1, run.max_steps + 1):
        optimizer.zero_grad()
        total, count = 0.0, 0
        for micro in order.micro_batches(step):
            made = combine([data[i] for i in micro.ids], micro)
            batch = placed(made, torch.device("cpu"), torch.float64)
            with randomness.micro_batch(step, micro.index):
                loss, counted = task.loss(
                    call(task.inputs(batch)), batch, *((step,) if takes_step(task) else ())
                )
            loss.backward()
            total, count = total + float(loss.detach()), count + int(counted)
        for parameter in named.values():
            if parameter.grad is not None:
                parameter.grad /= count
        limit = run.clip_norm if run.clip_norm is not None else float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        if edit is not None:
            edit(named, step)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(total / count)
    return Expected(losses=losses, norms=norms, state=_state(named, optimizer))


def assert_state_near(found: State, expected: State) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12, err_msg=str(name))


def _built(task: Task, initial: State) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.set_default_dtype(torch.float64)
    try:
        model = task.model().train()
        for fqn, module in model.named_modules():
            if any(buffer is not None for buffer in module._buffers.values()):
                task.init(module, fqn)
        optimizer = task.optimizer(model.named_parameters())
        schedule = task.schedule(optimizer)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(initial[fqn, "param"]))
    return model, optimizer, schedule


def _state(named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> State:
    state = {(fqn, "param"): p.detach().numpy() for fqn, p in named.items()}
    for fqn, parameter in named.items():
        for name, value in optimizer.state.get(parameter, {}).items():
            if name != "step":
                state[fqn, name] = value.numpy()
    return state
