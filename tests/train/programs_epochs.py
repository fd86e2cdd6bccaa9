"""Loops that ask for their batches in ways that would not do what they say."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import StepLR

from tests.train.programs import Net, Points


def _declared(ctx: Any) -> tuple[Any, Any]:
    net = ctx.model("net", lambda: Net(0.2))
    return net, ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)


def _trained(ctx: Any, net: Any, batch: Any) -> None:
    with ctx.step() as step:
        for micro in batch:
            step.backward((net(micro["x"]) - micro["y"]).square().mean())


def loop_over_epochs(ctx: Any) -> None:
    net, optimizer = _declared(ctx)
    schedule = ctx.register("schedule", StepLR(optimizer, 1, 0.5))
    for _ in range(3):
        for batch in ctx.batches(Points):
            _trained(ctx, net, batch)
        schedule.step()


def _epoch(ctx: Any, net: Any) -> None:
    for batch in ctx.batches(Points):
        _trained(ctx, net, batch)


def epoch_in_a_function(ctx: Any) -> None:
    net, _ = _declared(ctx)
    done = 0
    while done < 2:
        _epoch(ctx, net)
        done += 1


def another_data_set_later(ctx: Any) -> None:
    net, _ = _declared(ctx)
    for batch in ctx.batches(Points):
        _trained(ctx, net, batch)
        if batch.step == 2:
            break
    for batch in ctx.batches(lambda: Points()):
        _trained(ctx, net, batch)


def asked_for_one_by_one(ctx: Any) -> None:
    net, _ = _declared(ctx)
    batches = ctx.batches(Points)
    while (batch := next(batches, None)) is not None:
        _trained(ctx, net, batch)
