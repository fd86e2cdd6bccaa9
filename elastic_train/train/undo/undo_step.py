"""Undo the last step of an optimizer, or part of it: tried first, so that a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from elastic_train.errors import UndoRefused
from elastic_train.train.undo import adaptive, foreach, momentum
from elastic_train.train.undo.bucket import Bucket, Refusal, Rule, Undone
from elastic_train.train.undo.proof import check_redo

RULES: Mapping[str, tuple[Rule, tuple[str, ...]]] = {
    "SGD": (momentum.sgd, ("momentum_buffer",)),
    "Lion": (momentum.lion, ("exp_avg",)),
    "Adam": (adaptive.adam, ("exp_avg", "exp_avg_sq")),
    "AdamW": (adaptive.adam, ("exp_avg", "exp_avg_sq")),
    "LAMB": (adaptive.lamb, ("exp_avg", "exp_avg_sq")),
    "Lamb": (adaptive.lamb, ("exp_avg", "exp_avg_sq")),
    "Adagrad": (adaptive.adagrad, ("sum",)),
    "RMSprop": (adaptive.rmsprop, ("square_avg", "grad_avg", "momentum_buffer")),
}
"""Rule and state tensors of each optimizer, by the name of its class."""

BUCKET_ELEMENTS = 1 << 24
WHOLE = frozenset({"LAMB", "Lamb"})
"""They look at norms of whole tensors: a shard alone doesn't say what they did."""


def refusal(optimizer: torch.optim.Optimizer) -> str | None:
    """Why no step of this optimizer can be undone, as far as its class and settings tell."""
    name = type(optimizer).__name__
    if name not in RULES:
        return f"no rule is known for it, only for {', '.join(sorted(RULES))}"
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        return "amsgrad keeps only the largest second moment, what it was before is lost"
    return None


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Each group's hyperparameters as they are now, to be kept for the undo of the next step."""
    return [
        {
            name: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def undo(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    settings: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Take `parameters`, by fqn, and their optimizer state back by the step that their `grad` made.

    Those without a gradient were not touched by the step and stay. `settings` are each group's
    hyperparameters during the step, where a schedule has changed them since. Raises UndoRefused, and then
    nothing was changed. No rank waits for another.
    """
    name = type(optimizer).__name__
    why = refusal(optimizer)
    if why is not None:
        raise UndoRefused(optimizer=name, tensor="", reason=why)
    chosen = list(_buckets(optimizer, parameters, settings or settings_of(optimizer)))
    for fqns, bucket, _ in chosen:
        check_redo(optimizer, bucket, _undone(name, fqns, bucket), lambda place, f=fqns: f[place])
    for fqns, bucket, steps in chosen:
        before = _undone(name, fqns, bucket)
        _write(bucket, before)
        for step in steps:
            step -= 1


def _undone(name: str, fqns: Sequence[str], bucket: Bucket) -> Undone:
    try:
        with torch.no_grad():
            return RULES[name][0](bucket)
    except Refusal as refused:
        raise UndoRefused(optimizer=name, tensor=fqns[refused.place], reason=refused.reason) from None


def _write(bucket: Bucket, before: Undone) -> None:
    with torch.no_grad():
        foreach.copy_into(bucket.parameters, before["param"])
        for state, values in before.items():
            if state != "param":
                foreach.copy_into(bucket.states[state], values)


def _buckets(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    settings: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[list[str], Bucket, list[torch.Tensor]]]:
    """Runs of local tensors of one group, dtype, device and count of updates, with their step counters."""
    name = type(optimizer).__name__
    names = {id(p): fqn for fqn, p in parameters.items()}
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        alike: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for parameter in group["params"]:
            fqn = names.get(id(parameter))
            if fqn is None or parameter.grad is None:
                continue
            _check(name, fqn, optimizer, parameter)
            step = optimizer.state[parameter].get("step")
            updates = 0 if step is None else int(step)
            alike.setdefault((parameter.dtype, parameter.device, updates), []).append(parameter)
        for (_, _, updates), members in alike.items():
            for run in _runs(members):
                states = _states(optimizer, name, run)
                steps = [optimizer.state[p]["step"] for p in run if "step" in optimizer.state[p]]
                bucket = Bucket(
                    parameters=[_local(p.detach()) for p in run],
                    gradients=[_local(p.grad) for p in run],  # type: ignore[arg-type]
                    states=states,
                    updates=updates,
                    settings=values,
                )
                yield [names[id(p)] for p in run], bucket, steps


def _check(name: str, fqn: str, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    """Refuse what no rule can do: low precision, missing state, sharded tensors of a whole-tensor rule."""
    state = optimizer.state[parameter]
    tensors = [parameter, *(v for k, v in state.items() if isinstance(v, torch.Tensor) and k != "step")]
    low = next((t.dtype for t in tensors if t.dtype not in (torch.float32, torch.float64)), None)
    if low is not None:
        reason = f"{str(low).removeprefix('torch.')} has too few digits; keep fp32 master weights"
        raise UndoRefused(optimizer=name, tensor=fqn, reason=reason)
    if name in WHOLE and isinstance(parameter, DTensor):
        sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        if any(isinstance(placement, Shard) and size > 1 for placement, size in sizes):
            raise UndoRefused(optimizer=name, tensor=fqn, reason="it looks at whole tensors, this is a shard")
    step = state.get("step")
    if step is not None and (not isinstance(step, torch.Tensor) or int(step) < 1):
        raise UndoRefused(optimizer=name, tensor=fqn, reason="its count of steps is no tensor or is 0")


def _states(
    optimizer: torch.optim.Optimizer, name: str, run: Sequence[nn.Parameter]
) -> dict[str, list[torch.Tensor]]:
    found: dict[str, list[torch.Tensor]] = {}
    for state in RULES[name][1]:
        values = [optimizer.state[p].get(state) for p in run]
        if all(isinstance(value, torch.Tensor) for value in values):
            found[state] = [_local(value) for value in values]
    return found


def _runs(members: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    run: list[nn.Parameter] = []
    size = 0
    for parameter in members:
        elements = _local(parameter.detach()).numel()
        if run and size + elements > BUCKET_ELEMENTS:
            yield run
            run, size = [], 0
        run.append(parameter)
        size += elements
    if run:
        yield run


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
