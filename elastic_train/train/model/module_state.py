"""State of modules beside parameters and buffers: their mode, `get_extra_state`, and attributes that a loop
sets. The document carries it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from elastic_train.errors import ConfigError
from elastic_train.train.model.plain_values import Unstorable, decoded, encoded
from elastic_train.train.model.tensor_names import canonical

State = dict[str, dict[str, Any]]
"""By the path of a module, JSON values."""


def built(model: nn.Module) -> State:
    """The mode of each module, and its attributes that are numbers, texts or flags."""
    return {
        canonical(path): {"training": module.training, **_attributes(module)}
        for path, module in model.named_modules()
    }


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name != "training"
        and (value is None or type(value) in (bool, int, float, str))
    }


def _changed(module: nn.Module, was: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in _attributes(module).items()
        if name not in was or (type(was[name]), was[name]) != (type(value), value)
    }


def keeps_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def capture(model: nn.Module, before: Mapping[str, Mapping[str, Any]], *, attributes: bool = False) -> State:
    """What there is, as it is now: modes, and `attributes` where wanted, that are not as `before`.

    ConfigError names what cannot be stored.
    """
    found: State = {}
    for raw, module in model.named_modules():
        path = canonical(raw)
        own: dict[str, Any] = {}
        was = before.get(path, {})
        if was.get("training", module.training) != module.training:
            own["training"] = module.training
        if attributes and (changed := _changed(module, was)):
            own["attributes"] = changed
        if keeps_extra_state(module):
            try:
                own["extra"] = encoded(module.get_extra_state())
            except Unstorable as error:
                raise ConfigError(
                    field=f"model.{path}" if path else "model",
                    problem=f"its get_extra_state() holds {error}, which cannot be stored.",
                    remedy="Return numbers, texts, small tensors, and lists and mappings of them; register "
                    "large tensors as buffers.",
                ) from error
        if own:
            found[path] = own
    return found


def restore(model: nn.Module, state: Mapping[str, Mapping[str, Any]], device: torch.device) -> None:
    modules = {canonical(path): module for path, module in model.named_modules()}
    for path, own in state.items():
        module = modules.get(path)
        if module is None:
            continue  # of another stage
        if "training" in own:
            module.training = own["training"]
        for name, value in own.get("attributes", {}).items():
            setattr(module, name, value)
        if "extra" in own and keeps_extra_state(module):
            module.set_extra_state(decoded(own["extra"], device))


@contextmanager
def extra_kept(model: nn.Module, device: torch.device) -> Iterator[None]:
    """What runs inside leaves the modules' extra state as it was."""
    before = capture(model, {})
    yield
    if capture(model, {}) != before:
        restore(model, before, device)
