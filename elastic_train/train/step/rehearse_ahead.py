"""Try before step 1 what would fail at the end of the first epoch or at the first evaluation.

A rehearsal runs on the real model, on all ranks together, and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from elastic_train.data.order import SampleOrder
from elastic_train.train.model.module_state import extra_kept
from elastic_train.train.state.shards import Shards
from elastic_train.train.step.evaluate import Evaluator
from elastic_train.train.step.micro_batch_work import Work
from elastic_train.train.step.stepper import Stepper
from elastic_train.train.step.workload import Mark

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def rehearse(
    stepper: Stepper,
    evaluator: Evaluator | None,
    shards: Shards,
    order: SampleOrder,
    max_steps: int,
    mark: Mark,
) -> tuple[str, ...]:
    """A micro-batch of fewer samples, if there will be one, and an evaluation's first and last one; the names
    of what that measures.

    A layer that needs several samples, or a loss or metric made for a fixed number of them, raises here. The
    samples are the first ones: a source that is read in order would read all of it for the last ones.
    """
    smallest = order.smallest(max_steps)
    if smallest is not None:
        first = order.micro_batches(1)[0]
        few = replace(first, ids=first.ids[: len(smallest.ids)])
        with untouched(shards.model), extra_kept(shards.model, shards.device):
            for _ in stepper.passes(1, [Work(micro_batch=few, filler=True)], rehearsed=True):
                pass
        stepper.take_back()
        shards.drop_gradients()
    return () if evaluator is None else evaluator.rehearse(mark)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Buffers, counters and generators of modules are put back, whatever a forward did to them."""
    modules = list(model.modules())
    plain = [{n: v for n, v in vars(m).items() if isinstance(v, _PLAIN)} for m in modules]
    states = [(g, g.get_state()) for m in modules for g in vars(m).values() if isinstance(g, torch.Generator)]
    buffers: list[tuple[nn.Module, str, Any, Any]] = [
        (module, name, tensor, None if tensor is None else tensor.clone())
        for module in modules
        for name, tensor in module._buffers.items()
    ]
    try:
        yield
    finally:
        for module, kept in zip(modules, plain, strict=True):
            vars(module).update(kept)
        for generator, state in states:
            generator.set_state(state)
        put_back(buffers)


def put_back(buffers: list[tuple[nn.Module, str, Any, Any]]) -> None:
    """Modules have the tensors that they had, with the values that these had."""
    for module, name, tensor, kept in buffers:
        module._buffers[name] = tensor
        if tensor is not None and kept is not None and not torch.equal(tensor, kept):
            with torch.no_grad():
                tensor.copy_(kept)
