"""Scalars of the training state as a JSON document: what checkpoints and survivors give beside fragments.

Everything is keyed by fqn, nothing by rank or plan. Restoring has no side effects: no dummy step, no casts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from elastic_train.checkpoint.merging import STAGE
from elastic_train.errors import ConfigError, TensorMismatch
from elastic_train.recovery.evidence import Vote
from elastic_train.train.model import module_state
from elastic_train.train.model.loss_scale import Scale
from elastic_train.train.model.optimizer import hyperparameters
from elastic_train.train.state.compatibility import in_own_names
from elastic_train.train.state.live_fragments import DTYPE_NAMES, DTYPES, is_empty, is_fragment, shard_like
from elastic_train.train.state.shards import Shards

SCHEDULED = frozenset({"lr", "initial_lr", "momentum", "betas"})
"""Hyperparameters that torch's schedulers set, where a loop steps one itself."""


def describe(shards: Shards) -> dict[str, Any]:
    """The document of a state at a step boundary.

    A rank of a pipeline knows the optimizer's scalars of its own stage alone: `merged` puts the documents of
    the stages together. The first rank of each stage says which one it is.
    """
    states: list[list[str]] = []
    scalars: dict[str, dict[str, Any]] = {}
    for fqn, parameter in shards.parameters.items():
        if fqn in shards.absent:
            continue
        for state, value in shards.optimizer.state.get(parameter, {}).items():
            if is_empty(value):
                scalars.setdefault(fqn, {})[state] = {
                    "shape": list(value.shape),
                    "dtype": DTYPE_NAMES[value.dtype],
                }
            elif is_fragment(state, value, parameter):
                states.append([fqn, state])
            else:
                scalars.setdefault(fqn, {})[state] = _scalar(fqn, state, value)
    return {
        "step": shards.step,
        "vote": list(shards.applied.values) if shards.applied else None,
        "evaluated": shards.evaluated,
        "watched": dict(shards.watched),
        "scale": [shards.scale.value, shards.scale.steps] if shards.scale is not None else None,
        "trainable": list(shards.whole.trainable),
        "aliases": dict(shards.whole.aliases),
        "optimizer": {
            "class": type(shards.optimizer).__name__,
            "groups": [
                {"params": list(fqns), "hyperparameters": hyperparameters(group)}
                for fqns, group in zip(shards.whole.groups, shards.optimizer.param_groups, strict=True)
            ],
            "scalars": scalars,
            "states": states,
            "moving": shards.moving.document(),
        },
        "schedule": shards.schedule.document() if shards.schedule else None,
        "registered": dict(shards.registered.scalars) if shards.registered else {},
        "modules": dict(shards.modules),
        "generators": dict(shards.registered.generators) if shards.registered else {},
    } | ({STAGE: shards.place.stage} if shards.place.leads_a_stage else {})


def restore(
    shards: Shards, document: Mapping[str, Any], filled: Mapping[tuple[str, str], torch.Tensor]
) -> list[str]:
    """Complete the shards with a document's scalars; sentences about differences that a person should see.

    `filled` are the optimizer's state tensors that were given memory and values. Hyperparameters come from
    the code, but for those that the schedule drives.
    """
    document = in_own_names(document, shards.whole.aliases)
    if shards.registered is None:
        _check_trainable(shards, document["trainable"])
    else:  # a loop may freeze and unfreeze; other systems don't say what was frozen
        if "foreign" not in document:
            shards.train(document["trainable"])
        shards.registered.generators = dict(document.get("generators", {}))
    kept = document["optimizer"]
    listed = {(fqn, state) for fqn, state in kept["states"]}
    absent = sorted(name for name in listed - set(filled) if name[0] not in shards.elsewhere)
    if absent:
        raise TensorMismatch(
            url=f"step {document['step']}",
            problem=f"the optimizer state {absent[0][1]!r} of {absent[0][0]!r} is listed and was not found.",
        )
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for (fqn, state), value in filled.items():
        if (fqn, state) in listed:
            tensors.setdefault(fqn, {})[state] = value
    group_of = {p: group for group in shards.optimizer.param_groups for p in group["params"]}
    for fqn, parameter in shards.parameters.items():
        own: dict[str, Any] = {
            state: _value(scalar, state, group_of.get(parameter, {}), parameter, shards.device)
            for state, scalar in kept["scalars"].get(fqn, {}).items()
        }
        own |= tensors.get(fqn, {})
        if own:
            shards.optimizer.state[parameter] = own
    shards.optimizer.__setstate__(
        {"state": shards.optimizer.state, "param_groups": shards.optimizer.param_groups}
    )
    schedule = document["schedule"]
    driven = frozenset[str]()
    if shards.schedule is not None and schedule is not None:
        driven = shards.schedule.driven_by(schedule)
    shards.modules = dict(document.get("modules", {}))
    module_state.restore(shards.model, shards.modules, shards.device)
    shards.moving.restore(shards.optimizer, kept.get("moving", []), shards.device)
    if shards.registered is not None:
        shards.registered.scalars = dict(document.get("registered", {}))
        driven |= SCHEDULED if shards.registered.schedules else frozenset()
    notes = _hyperparameters(shards, kept["groups"], driven)
    if kept["class"] != type(shards.optimizer).__name__:
        notes.append(
            f"optimizer: the run used {kept['class']}, the code has {type(shards.optimizer).__name__}"
        )
    if shards.schedule is not None and document["schedule"] is not None:
        notes += shards.schedule.load(document["schedule"])
    elif shards.schedule is not None and "foreign" in document:
        notes += shards.schedule.advance(document["step"])
    elif (shards.schedule is None) != (document["schedule"] is None):
        notes.append("schedule: " + ("the code has none" if shards.schedule is None else "it starts anew"))
    shards.step, shards.evaluated = document["step"], document["evaluated"]
    shards.watched = dict(document.get("watched", {}))
    if shards.scale is not None and document.get("scale") is not None:
        value, steps = document["scale"]
        shards.scale = Scale(value=value, steps=steps)
    if document["vote"] is not None:
        shards.applied = Vote(step=document["step"], values=tuple(document["vote"]))
    return notes


def _check_trainable(shards: Shards, trainable: list[str]) -> None:
    own = set(shards.whole.trainable)
    for fqn in sorted(own ^ set(trainable)):
        now, before = ("trainable", "frozen") if fqn in own else ("frozen", "trainable")
        raise ConfigError(
            field="task.model",
            problem=f"parameter {fqn!r} is {now}, and was {before} when this state was kept.",
            remedy="Restore requires_grad as it was, or start a new run from an export.",
        )


def _hyperparameters(shards: Shards, groups: list[dict[str, Any]], driven: frozenset[str]) -> list[str]:
    """Restore what the schedule drives; the code's values stay for the rest, differences are reported."""
    before = {fqn: group["hyperparameters"] for group in groups for fqn in group["params"]}
    notes: list[str] = []
    for number, group in enumerate(shards.optimizer.param_groups):
        fqns = shards.whole.groups[number]
        if fqns:
            kept = before.get(fqns[0], {})
        elif number < len(groups) and not groups[number]["params"]:
            kept = groups[number]["hyperparameters"]
        else:
            continue
        now = hyperparameters(group)
        for name in sorted((set(kept) & set(now)) - shards.moving.entries(number)):
            if name in driven:
                group[name] = _typed(group[name], kept[name])
            elif kept[name] != now[name]:
                notes.append(
                    f"optimizer group {number} {name}: the run used {kept[name]!r}, "
                    f"the code says {now[name]!r}, which is used"
                )
    return notes


def _typed(like: Any, value: Any) -> Any:
    """A JSON value as the type it had."""
    if isinstance(like, torch.Tensor):
        return torch.tensor(value, dtype=like.dtype, device=like.device)
    return tuple(value) if isinstance(like, tuple) else value


def _scalar(fqn: str, state: str, value: Any) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return {"value": value.item(), "dtype": DTYPE_NAMES[value.dtype]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise ConfigError(
        field="task.optimizer",
        problem=f"keeps a {type(value).__name__} as {state!r} of {fqn!r}, which cannot be stored.",
        remedy="Keep tensors and plain numbers in the optimizer's state.",
    )


def _value(
    scalar: Mapping[str, Any],
    state: str,
    group: Mapping[str, Any],
    parameter: nn.Parameter,
    device: torch.device,
) -> Any:
    """A stored scalar as the optimizer wants it now: its flags may have changed since."""
    if "dtype" not in scalar:
        return scalar["value"]
    if "shape" in scalar:
        return shard_like(parameter, tuple(scalar["shape"]), DTYPES[scalar["dtype"]], device)
    # torch keeps `step` on the CPU unless the update itself runs on the device.
    on_device = state != "step" or group.get("fused") or group.get("capturable")
    return torch.tensor(
        scalar["value"], dtype=DTYPES[scalar["dtype"]], device=device if on_device else torch.device("cpu")
    )
