"""Every random choice as a function of the seed and of logical positions, never of rank or world size.

No generator's state is ever saved: the rank that runs micro-batch i of step k seeds the generators from
(seed, k, i) and draws what anybody else would have drawn.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic_train.errors import ConfigError
from elastic_train.train.model.compiled import Around, inside, is_compiled_in_place
from elastic_train.train.model.copies import EngineHook
from elastic_train.train.model.dropout import Slice, keyed_dropout
from elastic_train.train.model.tensor_names import canonical

_MASK = (1 << 64) - 1


def derive(seed: int, purpose: str, *parts: int | str) -> int:
    """64 bits that depend on all arguments and on nothing else, whatever the machine or version."""
    text = "\0".join([str(seed), purpose, *(f"{type(part).__name__}:{part}" for part in parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def seed_all(value: int, device: torch.device | str = "cpu") -> None:
    """Seed Python's, numpy's and torch's global generators, and the device's."""
    random.seed(value)
    np.random.seed([value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF])
    _seed_torch(value, torch.device(device))


def seed_sample(seed: int, epoch: int, sample: int) -> None:
    """Seed whatever a data set draws from while it loads one sample: by epoch and id, not by plan."""
    seed_all(derive(seed, "sample", epoch, sample))


def generator_states() -> dict[str, Any]:
    """The state of the host's global generators, as JSON values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
    }


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Go on from there."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states["torch"]), dtype=torch.uint8))


def drawn_so_far(device: torch.device) -> torch.Tensor:
    """What differs once anything draws: the state of the CPU's generator, by which masks are keyed, and of
    the device's."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return torch.cat(states)


@contextmanager
def preserved(device: torch.device | str = "cpu") -> Iterator[None]:
    """Leave every global generator as it was found."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    device = torch.device(device)
    accelerator = torch.get_device_module(device).get_rng_state(device) if device.type != "cpu" else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if accelerator is not None:
            torch.get_device_module(device).set_rng_state(accelerator, device)


@dataclass(slots=True, eq=False)
class Draws:
    """What the forward of a micro-batch drew, for as long as its backward may repeat parts of it."""

    key: int
    calls: Counter[str] = field(default_factory=Counter[str])
    number: dict[tuple[str, int], int] = field(default_factory=dict)  # (block, seed on entry) -> its call
    open: dict[str, int] = field(default_factory=dict)


class Randomness:
    """Seeds a model's random operations by micro-batch and by block.

    A block is an element of a ModuleList, ModuleDict or Sequential. Its own seed, from its name, makes its
    masks independent of what ran before it in this process, so a pipeline may be cut between any two blocks.
    Where a block is compiled by torch, what is in it draws from the block's seed.
    A module that is called again within a micro-batch draws anew. Random operations between the blocks of the
    outermost module follow the seed of the micro-batch or of the block before them.

    `around(seeding, block)` seeds in the place of a plain call, to look at the generator before and after.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        around: Callable[[Callable[[], None], str], None] | None = None,
        part: Slice | None = None,
    ) -> None:
        """`part` says which positions of activations are here, where they are divided."""
        self._seed = seed
        self._part = part
        self._device = torch.device(device)
        self._around = around or _seeding
        self._draws: Draws | None = None  # of the micro-batch under way
        self._hooks: list[Any] = []
        within = inside(model)
        for name, block in _blocks(model):
            if id(block) in within:
                continue  # what is compiled draws as one
            salt = derive(0, "block", name)
            enter, leave = partial(self._enter, name, salt), partial(self._leave, name, salt)
            if is_compiled_in_place(block):
                self._hooks.append(Around(block, lambda own, args, _, call=enter: call(own, args), leave))
                continue
            self._hooks.append(block.register_forward_pre_hook(EngineHook(enter)))
            self._hooks.append(block.register_forward_hook(EngineHook(leave)))

    @contextmanager
    def micro_batch(self, step: int, index: int) -> Iterator[Draws]:
        """Forward of micro-batch `index` of a step, and backward unless that is run apart, belong inside."""
        draws = Draws(derive(self._seed, "micro-batch", step, index))
        with self._within(draws, draws.key):
            yield draws

    @contextmanager
    def backward(self, draws: Draws) -> Iterator[None]:
        """A backward, and the recomputation in it, that is run apart from its forward, with its draws."""
        with self._within(draws, derive(draws.key, "backward")):
            yield

    @contextmanager
    def rehearsing(self, turn: int = 0) -> Iterator[None]:
        """What runs inside draws what it would draw now, or in another turn other numbers, and leaves no
        trace."""
        draws, before = self._draws, torch.default_generator.initial_seed()
        with preserved(self._device):
            if draws is not None:
                key = derive(draws.key, "turn", turn) if turn else draws.key
                self._draws = Draws(key, draws.calls.copy(), dict(draws.number), dict(draws.open))
            if turn:
                seed_all(derive(before, "turn", turn), self._device)
            try:
                yield
            finally:
                self._draws = draws
        assert torch.default_generator.initial_seed() == before

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def _within(self, draws: Draws, seed: int) -> Iterator[None]:
        self._draws = draws
        seed_all(seed, self._device)
        try:
            with keyed_dropout(self._part):
                yield
        finally:
            self._draws = None

    def _enter(self, name: str, salt: int, block: nn.Module, inputs: Any) -> None:
        draws = self._draws
        if draws is None:
            return
        found = (name, torch.default_generator.initial_seed())
        if torch._C._current_graph_task_id() == -1:
            number = draws.number[found] = draws.calls[name]
            draws.calls[name] += 1
        else:
            number = _recomputed(draws, found)
        draws.open[name] = number
        value = _mixed(draws.key ^ salt, 2 * number)
        self._around(lambda: _seed_torch(value, self._device), name)

    def _leave(self, name: str, salt: int, block: nn.Module, inputs: Any, output: Any) -> None:
        draws = self._draws
        if draws is not None:
            # A seed that no other call leaves behind: by it a recomputation knows which call it repeats.
            value = _mixed(draws.key ^ salt, 2 * draws.open[name] + 1)
            self._around(lambda: _seed_torch(value, self._device), name)


def _recomputed(draws: Draws, found: tuple[str, int]) -> int:
    """Which call of a block activation checkpointing repeats: it restored the generator of that call."""
    number = draws.number.get(found)
    if number is not None:
        return number
    if draws.calls[found[0]] == 1:
        return 0
    raise ConfigError(
        field=f"model.{found[0]}",
        problem="is called several times, and recomputed without the random state of the call.",
        remedy="Call torch.utils.checkpoint with preserve_rng_state=True.",
    )


def _seeding(seeding: Callable[[], None], block: str) -> None:
    seeding()


def _blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Elements of containers by name, without the names that wrappers add; a shared element once."""
    seen: set[int] = set()
    for name, container in model.named_modules():
        if isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            for part, block in container.named_children():
                if id(block) not in seen:
                    seen.add(id(block))
                    yield canonical(f"{name}.{part}" if name else part), block


def _seed_torch(value: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(value)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(value)


def _mixed(key: int, number: int) -> int:
    """SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) at position `number`."""
    word = (key + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _MASK
    return word ^ word >> 31
