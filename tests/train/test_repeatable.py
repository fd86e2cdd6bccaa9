"""What a task may leave on itself when its functions are called, and what it may not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from elastic_train.errors import ConfigError
from elastic_train.train.model import value_prints
from elastic_train.train.model.surroundings import Surroundings
from elastic_train.train.model.value_prints import print_of
from elastic_train.train.step.repeatable import Repeatable
from tests.tasks.tiny import TinyTask

pytestmark = pytest.mark.ring2
Leaves = Callable[[Any, torch.Tensor], Any]


def called(leaves: Leaves) -> None:
    class Leaving(TinyTask):
        def loss(self, output: Any, micro_batch: Any) -> Any:
            self.left = leaves(getattr(self, "left", None), micro_batch)
            return micro_batch.mean()

    @contextmanager
    def rehearsing() -> Iterator[None]:
        yield

    task = Leaving()
    around = Surroundings.of([task])
    repeatable = Repeatable(task, rehearsing, torch.device("cpu"), surroundings=around, several=True)
    repeatable("loss", None, torch.linspace(0, 1, 500, requires_grad=True))


@pytest.mark.parametrize(
    "leaves",
    [
        lambda _, batch: batch * 2,
        lambda _, batch: {"logits": [batch * 2], "mean": batch.mean().item()},
        lambda _, batch: batch.detach().numpy() * 2,
        lambda _, batch: (batch.device, batch.dtype, batch.detach().numpy().max(), range(len(batch))),
    ],
    ids=["a tensor", "tensors in containers", "an array", "values"],
)
def test_an_output_of_the_last_call_may_be_left_to_be_looked_at(leaves: Leaves) -> None:
    called(leaves)


@pytest.mark.parametrize(
    "leaves",
    [
        lambda old, batch: (0.0 if old is None else old * 0.9) + batch,
        lambda old, batch: [*(old or []), batch],
        lambda old, batch: batch.new_zeros(500) if old is None else old.add_(1.0),
        lambda old, batch: SimpleNamespace(seen=batch + (0.0 if old is None else old.seen)),
    ],
    ids=["a moving mean", "a list that grows", "a tensor changed in place", "a sum in an object"],
)
def test_what_depends_on_the_calls_before_is_refused(leaves: Leaves) -> None:
    with pytest.raises(ConfigError, match="each call changes the task's attribute 'left'"):
        called(leaves)


@dataclass(slots=True)
class Slots:
    mean: torch.Tensor


@pytest.mark.parametrize("make", [Slots, lambda mean: torch.distributions.Normal(mean, 1.0)])
def test_an_object_that_a_forward_makes_anew_has_not_changed(make: Callable[[torch.Tensor], Any]) -> None:
    first, second, other = (make(torch.tensor(mean)) for mean in (0.0, 0.0, 0.5))
    assert print_of(first, content=True) == print_of(second, content=True) != print_of(other, content=True)


def test_an_object_with_slots_is_told_by_what_it_holds_however_deep_it_lies() -> None:
    """The table of its fields is made at each look, and is no object that could be found again."""
    held = [[[Slots(torch.zeros(1))]]]
    assert print_of(held) == print_of(held)


def test_of_an_array_that_is_larger_than_memory_may_be_the_ends_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(value_prints, "ENDS", 1 << 10)
    many = np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 40,), (0,))  # 8 TiB, of one element
    assert print_of({"train": many}) == print_of({"train": many})
    few = np.zeros(1 << 11)
    before = print_of(few)
    few[1 << 10] = 1
    assert print_of(few) != before
