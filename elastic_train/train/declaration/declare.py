"""Run a user's loop up to its first batch to collect its models, optimizers, state and data set.

The first builds models and optimizers on the meta device, the second finds them divided, with memory and
without values. Both end where the loop asks for its first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from elastic_train.errors import ConfigError
from elastic_train.train.declaration.abort import Declared
from elastic_train.train.model.collate import Collate
from elastic_train.train.model.lbfgs import by_parameter
from elastic_train.train.model.meta_build import without_values
from elastic_train.train.model.registered_state import Registered, check_dtype, check_registered
from elastic_train.train.model.rng import generator_states
from elastic_train.train.model.several_models import Models, Optimizers, check_model, check_optimizer
from elastic_train.train.model.user_hooks import keys_of_hooks, put_back, take_away

T = TypeVar("T")
Loop = Callable[[Any], object]
Init = Callable[[nn.Module, str], None]


@dataclass(slots=True, kw_only=True, eq=False)
class Declaration:
    """What a loop declares. `settings` are the groups of each optimizer as they were built."""

    models: Models
    where: torch.device
    inits: dict[str, Init] = field(default_factory=dict[str, Init])
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict[str, torch.optim.Optimizer])
    settings: dict[str, list[dict[str, Any]]] = field(default_factory=dict[str, list[dict[str, Any]]])
    things: list[str] = field(default_factory=list[str])
    # Of the global generators, after each model was built for real; none where the loop draws nothing then.
    generators: dict[str, Any] = field(default_factory=dict[str, Any])
    dataset: Any = None
    collate: Collate | None = None
    optimizer: Optimizers | None = None  # all of them

    def reset(self, name: str) -> torch.optim.Optimizer:
        """An optimizer with the hyperparameters that it was built with, whatever schedules did since."""
        optimizer = self.optimizers[name]
        for group, before in zip(optimizer.param_groups, self.settings[name], strict=True):
            for key in [key for key in group if key != "params" and key not in before]:
                del group[key]
            group.update(_apart(before))
        return optimizer


def _apart(settings: Mapping[str, Any]) -> dict[str, Any]:
    """With tensors of their own: a loop may write into a rate that is one."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in settings.items()
    }


def declare(loop: Loop) -> Declaration:
    """The first pass. Models are built where new tensors are now: on the meta device, or for real. The loop's
    own are on the CPU."""
    declaration = Declaration(models=Models(), where=torch.get_default_device())
    first = _First(declaration)
    with torch.device("cpu"):
        _passed(loop, first)
    if declaration.where.type == "meta" or not first.drew:
        declaration.generators = {}
    for name, kept in first.hooks.items():
        take_away(getattr(declaration.models, name), kept)
    if not list(declaration.models.children()):
        raise ConfigError(field="loop", problem="it declares no ctx.model(...) before its first batch.")
    if not declaration.optimizers:
        raise ConfigError(field="loop", problem="it declares no ctx.optimizer(...) before its first batch.")
    declaration.optimizer = Optimizers(declaration.optimizers)
    declaration.models.__dict__["declared"] = declaration  # no submodule
    return declaration


def declared(model: nn.Module) -> Declaration:
    """What was declared of the models of a rank."""
    return model.__dict__["declared"]


def registered(loop: Loop, model: nn.Module) -> Registered:
    """The second pass: memory for what is registered, on the shards that the model has now."""
    second = _Second(declared(model))
    with put_back(model):
        _passed(loop, second)
    return second.found


def _passed(loop: Loop, context: _Declaring) -> None:
    try:
        loop(context)
    except Declared:
        return
    raise ConfigError(field="loop", problem="it returned without asking for ctx.batches(...).")


class Rows:
    """What is carried, before there are batches."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self._value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._value = state["rows"]


class _Declaring:
    """A context before the first batch."""

    def __init__(self, declaration: Declaration) -> None:
        self._declaration = declaration

    def __getattr__(self, name: str) -> NoReturn:
        raise ConfigError(
            field=f"ctx.{name}",
            problem="there is nothing to answer before the first batch: state is only declared there.",
            remedy="Use it inside the loop over ctx.batches(...).",
        )

    def optimizer(self, name: str, make: Callable[..., Any], model: Any, **settings: Any) -> Any:
        return self._declaration.reset(name)

    def model(self, name: str, build: Callable[[], nn.Module], *, init: Init | None = None) -> nn.Module:
        return getattr(self._declaration.models, name)

    def register(self, name: str, thing: T) -> T:
        return thing

    def carry(self, name: str, value: Any, *, dim: int = 0) -> Rows:
        if isinstance(value, torch.Tensor):
            check_dtype(f"ctx.carry({name!r})", name, value)
        return self.register(name, Rows(value))

    def batches(self, dataset: Any, *, collate: Collate | None = None) -> Iterator[Any]:
        raise Declared


class _First(_Declaring):
    def __init__(self, declaration: Declaration) -> None:
        super().__init__(declaration)
        self.drew = False  # random numbers, beside its models
        self.hooks: dict[str, Mapping[tuple[int, str], frozenset[int]]] = {}  # that models were built with

    def model(self, name: str, build: Callable[[], nn.Module], *, init: Init | None = None) -> nn.Module:
        self._new(name, "model")
        self._look()
        with torch.device(self._declaration.where):
            on_meta = self._declaration.where.type == "meta"
            model = check_model(name, without_values(build) if on_meta else build())
        self._declaration.models.add_module(name, model)
        self.hooks[name] = keys_of_hooks(model)
        self._declaration.generators[name] = self._last = generator_states()
        if init is not None:
            self._declaration.inits[name] = init
        return model

    def optimizer(self, name: str, make: Callable[..., Any], model: Any, **settings: Any) -> Any:
        self._new(name, "optimizer")
        parameters = list(model.parameters()) if isinstance(model, nn.Module) else model
        field = f"ctx.optimizer({name!r})"
        optimizer = check_optimizer(field, by_parameter(make(parameters, **settings)))
        if optimizer.state:
            raise ConfigError(
                field=field,
                problem=f"{type(optimizer).__name__} makes its state when it is built, before there are "
                "shards.",
                remedy="Choose one that makes it at its first step().",
            )
        self._declaration.optimizers[name] = optimizer
        self._declaration.settings[name] = [
            _apart({key: value for key, value in group.items() if key != "params"})
            for group in optimizer.param_groups
        ]
        return optimizer

    def register(self, name: str, thing: T) -> T:
        self._new(name, "register")
        check_registered(name, thing)
        self._declaration.things.append(name)
        return thing

    def batches(self, dataset: Any, *, collate: Collate | None = None) -> Iterator[Any]:
        self._look()
        self._declaration.dataset, self._declaration.collate = dataset, collate
        raise Declared

    def _look(self) -> None:
        self.drew |= bool(self._declaration.generators) and self._last != generator_states()

    def _new(self, name: str, what: str) -> None:
        field = f"ctx.{what}({name!r})"
        if not name.isidentifier():
            raise ConfigError(field=field, problem="a name is letters, digits and underscores.")
        taken = {*self._declaration.models._modules, *self._declaration.optimizers, *self._declaration.things}
        if name in taken or hasattr(nn.Module, name):
            raise ConfigError(field=field, problem="the name is taken.", remedy="Choose another one.")


class _Second(_Declaring):
    def __init__(self, declaration: Declaration) -> None:
        super().__init__(declaration)
        self.found = Registered()

    def register(self, name: str, thing: T) -> T:
        self.found.reserve(name, thing)
        return thing
