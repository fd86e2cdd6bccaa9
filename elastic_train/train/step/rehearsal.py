"""Compute a run's first micro-batch twice, to find state that no checkpoint carries.

The forward of each model runs once more before the first one that counts, with the same samples and random
numbers. What then differs, in the output or in what a module keeps, is what the first one left behind: a
counter, a moving value, a generator of its own. Other ranks run other micro-batches, and after a change of
the group it would begin anew: it is refused by name. So is a parameter that a forward changes.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from elastic_train.errors import ConfigError
from elastic_train.train.model.compiled import Around, is_compiled_in_place
from elastic_train.train.model.module_state import keeps_extra_state
from elastic_train.train.model.rng import Randomness
from elastic_train.train.model.several_models import Models
from elastic_train.train.model.surroundings import Kept, Surroundings, is_own
from elastic_train.train.model.tensor_names import canonical
from elastic_train.train.model.value_prints import print_of
from elastic_train.train.parallel.trained_parts import TrainedParts
from elastic_train.train.state.live_fragments import numpy_bits
from elastic_train.train.step.changing_buffers import ChangingBuffers
from elastic_train.train.step.elsewhere import check_elsewhere
from elastic_train.train.step.freezing_by_chance import check_freezing
from elastic_train.train.step.repeated_calls import depends, with_others

_TORCHS = frozenset({"training", "_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"})
SAMPLED = 1 << 16
"""Elements at each end of a parameter that are compared by content; versions tell of the rest."""
ALONE = "or allow the run one worker, with ScalingConfig(num_workers=1)."

Place = tuple[str, str]
"""A module's path, and the name of its attribute; no path where it is outside of modules."""
OUTSIDE = "*"


class Rehearsal:
    """Of a model, or of each of several; without one it sees nothing."""

    def __init__(
        self,
        model: nn.Module | None,
        *,
        buffers: ChangingBuffers,
        randomness: Randomness,
        parameters: Mapping[str, nn.Parameter],
        device: torch.device,
        several: bool,
        trained: TrainedParts,
        surroundings: Surroundings | None = None,
    ) -> None:
        """`parameters` are those that this rank keeps; `several`: whether more than one rank may ever run
        the model. `surroundings` are of the job's code.
        """
        self._trained = trained
        self._surroundings = surroundings or Surroundings()
        self._roots = {} if model is None else {"": model}
        if isinstance(model, Models):
            self._roots = dict(model.named_children())
        self._buffers, self._randomness = buffers, randomness
        self._parameters, self._device, self._several = parameters, device, several
        self._backwards = dict(self._roots)
        self._inside = False
        self._first: dict[str, tuple[dict[Place, Hashable], list[Any]]] = {}
        self._hooks: list[Any] = []
        self._gathered: dict[int, dict[str, Hashable]] = {}
        self._before: dict[nn.Parameter, torch.Tensor] = {}  # of those that the first forward changes

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """The forward of a micro-batch belongs inside. The first is looked at."""
        self._open()
        try:
            yield
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
            self._roots = {}

    @contextmanager
    def backward(self) -> Iterator[None]:
        """The backward of a micro-batch belongs inside. The first is looked at: what hooks keep shows."""
        models, self._backwards = self._backwards, {}
        before = {path: self._attributes(root, path) for path, root in models.items()}
        yield
        for path, root in models.items():
            for place, mark in self._attributes(root, path).items():
                if before[path].get(place) != mark:
                    raise _moves(place, self._several, "backward")

    def take_back(self) -> None:
        """The first micro-batch did not count: parameters are as they were before its forward."""
        for parameter, value in self._before.items():
            parameter.data.copy_(value)
        self._before = {}

    # -- private

    def _open(self) -> None:
        self._before = {}
        for path, root in self._roots.items():
            if is_compiled_in_place(root):
                self._hooks.append(Around(root, self._rehearse(path), self._compare(path)))
            else:
                self._hooks.append(
                    root.register_forward_pre_hook(self._rehearse(path), prepend=True, with_kwargs=True)
                )
                self._hooks.append(root.register_forward_hook(self._compare(path)))
            for inner, module in root.named_modules():
                if isinstance(module, FSDPModule) and self._several:
                    self._watch_gathered(module, f"{path}.{inner}".strip("."))

    def _rehearse(self, path: str) -> Any:
        def hook(root: nn.Module, args: Any, kwargs: Any) -> None:
            if self._inside or path in self._first:
                return
            self._inside = True
            before = marks_of(self._parameters)
            # Alone, a forward may change what it likes: then the first one counts once.
            extra = [] if self._several else _extra_states(root)
            kept = {} if self._several else {p: p.detach().clone() for p in self._parameters.values()}

            def call(others: bool, turn: int = 0) -> list[torch.Tensor]:
                given = with_others((args, kwargs)) if others else (args, kwargs)
                inputs, named = pytree.tree_map_only(torch.Tensor, again, given)
                for parameter, value in kept.items():
                    parameter.data.copy_(value)
                with self._randomness.rehearsing(turn), self._buffers.rehearsing(), _uncached(self._device):
                    return leaves_of(root(*inputs, **named))

            try:
                start, held = self._attributes(root, path), self._kept(root)
                there = _built(root)
                output = call(False)
                _check_built(there, root, path)
                self._first[path] = self._attributes(root, path), output
                lasting = depends(
                    start,
                    self._first[path][0],
                    held,
                    first=output,
                    call=call,
                    prints=lambda: self._attributes(root, path),
                    alike=partial(kept_alike, device=self._device),
                )
                if lasting is not None and not self._is_kept(lasting, root, path):
                    raise _moves(lasting, self._several)
                if self._several:
                    check_elsewhere(
                        self._surroundings,
                        output,
                        partial(call, False),
                        partial(kept_alike, device=self._device),
                        field=f"model.{path}" if path else "model",
                        what="forward",
                    )
                if self._surroundings.sets_grad:
                    check_freezing(self._trained, lambda turn: call(turn % 2 == 1, turn))
                after = marks_of(self._parameters)
                self._check_parameters(before, after)
                changed = [p for fqn, p in self._parameters.items() if before[fqn] != after[fqn]]
                self._before |= {p: kept[p] for p in changed if p in kept}
            finally:
                self._inside = False
                for module, state in extra:
                    module.set_extra_state(state)
                for parameter, value in kept.items():
                    parameter.data.copy_(value)

        return hook

    def _compare(self, path: str) -> Any:
        def hook(root: nn.Module, args: Any, output: Any) -> None:
            if self._inside or path not in self._first:
                return
            attributes, first = self._first[path]
            self._first[path] = {}, []  # only the first call
            if not attributes and not first:
                return
            declares = any(keeps_extra_state(module) for module in root.modules())
            for place, mark in self._attributes(root, path).items():
                if attributes.get(place) != mark and not self._is_kept(place, root, path):
                    raise _moves(place, self._several)
            if not kept_alike(first, leaves_of(output), self._device) and (self._several or not declares):
                raise ConfigError(
                    field=f"model.{path}" if path else "model",
                    problem="forward gives another output for the same samples and random numbers when it is "
                    "called again: something that is no parameter and no buffer is changed or drawn there.",
                    remedy="Draw from the generators of torch, numpy or random, which are seeded for each "
                    "micro-batch, and keep what lasts in parameters and buffers.",
                )

        return hook

    def _attributes(self, root: nn.Module, path: str) -> dict[Place, Hashable]:
        """Of what modules keep, and what surrounds them."""
        return {
            (inner, name): print_of(value, content=True)
            for inner, module in _modules(root, path)
            for name, value in vars(module).items()
            if _is_watched(name) and not (self._surroundings.unread(name) and is_own(module))
        } | {(OUTSIDE, name): mark for name, mark in self._surroundings.prints().items()}

    def _is_kept(self, place: Place, root: nn.Module, path: str) -> bool:
        """Whether a module carries it, where no more than one rank ever runs it."""
        return not self._several and any(
            inner == place[0] and keeps_extra_state(module) for inner, module in _modules(root, path)
        )

    def _kept(self, root: nn.Module) -> Kept:
        kept = Kept(self._surroundings)
        for module in root.modules():
            kept.hold(vars(module), _is_watched)
        return kept

    def _watch_gathered(self, unit: Any, path: str) -> None:
        """Between FSDP2's own hooks, where parameters are gathered: what is written there is lost."""

        def before(module: nn.Module, args: Any) -> None:
            self._gathered[id(module)] = marks_of(_gathered(module, path))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            marks = self._gathered.pop(id(module), None)
            if marks is not None:
                self._check_parameters(marks, marks_of(_gathered(module, path)))

        self._hooks.append(unit.register_forward_pre_hook(before))
        self._hooks.append(unit.register_forward_hook(after, prepend=True))

    def _check_parameters(self, before: Mapping[str, Hashable], after: Mapping[str, Hashable]) -> None:
        for fqn, mark in after.items():
            if self._several and fqn in before and before[fqn] != mark:
                raise ConfigError(
                    field=f"model.{fqn}",
                    problem="forward changes this parameter, so that it would come to depend on which rank "
                    "computes which samples.",
                    remedy="Clamp or normalise a copy of it in forward, or the parameter itself after the "
                    f"update, in a hook of the optimizer's step (register_step_post_hook), {ALONE}",
                )


def versions(parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """A number for each parameter that every write in place changes."""
    return {fqn: _version(parameter) for fqn, parameter in parameters.items()}


def _version(parameter: nn.Parameter) -> int:
    """Of a cut one too: writes to it as a whole are counted by the whole."""
    return parameter._version + local(parameter)._version


def check_unchanged(
    before: Mapping[str, int],
    parameters: Mapping[str, nn.Parameter],
    several: bool,
    but: Container[int] = frozenset[int](),
) -> None:
    """ConfigError where a parameter was written to between two updates; `but` are ids of those updated."""
    for fqn, parameter in parameters.items():
        changed = fqn in before and before[fqn] != _version(parameter)
        if several and changed and id(parameter) not in but:
            raise ConfigError(
                field=f"model.{fqn}",
                problem="this parameter was changed during a step, and not by an update of the engine's, so "
                "that it would come to depend on which rank computes which samples.",
                remedy="Change it after the update: in a hook of the optimizer's step "
                f"(register_step_post_hook), in a loop behind the block of the step, {ALONE}",
            )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of it, without its history."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def kept_alike(first: Sequence[Any], second: Sequence[Any], device: torch.device) -> bool:
    """Whether two outputs are the same: to the bit where kernels are."""
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        exact = device.type == "cpu"
        loose = 1e-9 if a.dtype == torch.float64 else 1e-4 if a.dtype == torch.float32 else 1e-1
        tolerance = 1e-12 if exact and a.dtype == torch.float64 else 1e-6 if exact else loose
        if not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            return False
    return True


def _built(root: nn.Module) -> dict[str, int]:
    """Modules and what lasts of their tensors, by path."""
    found = {canonical(path): id(module) for path, module in root.named_modules()}
    found |= {canonical(path): 0 for path, _ in root.named_parameters()}
    return found | {
        canonical(f"{path}.{name}".strip(".")): 0
        for path, module in root.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }


def _check_built(before: Mapping[str, int], root: nn.Module, path: str) -> None:
    """ConfigError for what a forward made."""
    after = _built(root)
    for inner in sorted(before.keys() ^ after.keys()):
        raise ConfigError(
            field=f"model.{path}.{inner}".replace("..", "."),
            problem="forward makes it or takes it away: nothing would train it, and no checkpoint hold it.",
            remedy="Make modules, parameters and persistent buffers in the model's constructor.",
        )


def _moves(place: Place, several: bool, when: str = "forward") -> ConfigError:
    path, name = place
    what = f"{when} changes {name}" if path == OUTSIDE else f"{when} changes this attribute"
    return ConfigError(
        field="model" if path == OUTSIDE else f"model.{path}.{name}" if path else f"model.{name}",
        problem=f"{what}, which depends on what ran before: it would differ between "
        "ranks, and begin anew whenever the group changes.",
        remedy="Compute it from the samples, and draw from the generators of torch, numpy and random, which "
        "are seeded for each micro-batch. "
        + (f"Or keep it by get_extra_state(), {ALONE}" if several else "Or keep it by get_extra_state()."),
    )


def _is_watched(name: str) -> bool:
    return name not in _TORCHS and not name.endswith("_hooks") and not name.startswith("_fsdp")


def _modules(root: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for inner, module in root.named_modules():
        yield canonical(f"{path}.{inner}".strip(".")), module


def _gathered(root: nn.Module, path: str) -> dict[str, nn.Parameter]:
    """What FSDP2 gathered."""
    named = root.named_parameters()
    return {canonical(f"{path}.{inner}".strip(".")): p for inner, p in named if not isinstance(p, DTensor)}


def marks_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, Hashable]:
    """Version and content of each."""
    found: dict[str, Hashable] = {}
    for fqn, parameter in parameters.items():
        own = local(parameter)
        flat = own.reshape(-1)
        ends = torch.cat([flat[:SAMPLED], flat[-SAMPLED:]]).cpu()
        found[fqn] = own._version, zlib.crc32(numpy_bits(ends).data)
    return found


def _extra_states(root: nn.Module) -> list[tuple[nn.Module, Any]]:
    kept = [module for module in root.modules() if keeps_extra_state(module)]
    return [(module, copy.deepcopy(module.get_extra_state())) for module in kept]


def leaves_of(output: Any) -> list[torch.Tensor]:
    """The tensors of an output, of containers of any kind."""
    if not isinstance(output, torch.Tensor | list | tuple | Mapping) and hasattr(output, "__dict__"):
        output = vars(output)
    found = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    own = [local(tensor) for tensor in found]
    return [leaf.clone() for leaf in own if leaf.layout is torch.strided]


def again(tensor: torch.Tensor) -> torch.Tensor:
    """A copy to work on: a forward may write into its inputs."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _uncached(device: torch.device) -> AbstractContextManager[Any]:
    """As outside, without a cache of cast weights that would be used again."""
    kind = device.type
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False)
