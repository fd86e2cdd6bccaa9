"""Loops that carry something from step to step which nobody keeps, and one that only tells it."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

from tests.train.programs import Net, Points
from tests.train.programs_loops import Queue


def _declared(ctx: Any) -> tuple[Any, Any]:
    net = ctx.model("net", lambda: Net(0.2))
    return net, ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)


def _trained(ctx: Any, net: Any, batch: Any, shift: Any = 0.0) -> float:
    with ctx.step() as step:
        for micro in batch:
            step.backward((net(micro["x"] + shift) - micro["y"]).square().mean())
    return step.loss


def schedule_of_a_variable(ctx: Any) -> None:
    net, optimizer = _declared(ctx)
    schedule = StepLR(optimizer, 2, 0.5)
    for batch in ctx.batches(Points):
        _trained(ctx, net, batch)
        schedule.step()


def schedules_of_a_list(ctx: Any) -> None:
    net, optimizer = _declared(ctx)
    schedules = [StepLR(optimizer, 2, 0.5), StepLR(optimizer, 3, 0.5)]
    for batch in ctx.batches(Points):
        _trained(ctx, net, batch)
        for schedule in schedules:
            schedule.step()


def average_of_a_variable(ctx: Any) -> None:
    net, _ = _declared(ctx)
    average = AveragedModel(net)
    for batch in ctx.batches(Points):
        _trained(ctx, net, batch)
        average.update_parameters(net)


def queue_of_a_variable(ctx: Any) -> None:
    net, _ = _declared(ctx)
    kept = Queue()
    for batch in ctx.batches(Points):
        loss = _trained(ctx, net, batch, kept.rows.mean(0))
        kept.rows = torch.cat([kept.rows[1:], torch.full((1, 6), loss, dtype=torch.float64)])


def losses_that_decide(ctx: Any) -> None:
    net, optimizer = _declared(ctx)
    seen: deque[float] = deque(maxlen=3)
    for batch in ctx.batches(Points):
        rate = 1e-2 / (1 + sum(seen))
        optimizer.param_groups[0]["lr"] = rate
        seen.append(_trained(ctx, net, batch))


def losses_that_are_told(ctx: Any) -> None:
    net, _ = _declared(ctx)
    seen: list[float] = []
    for batch in ctx.batches(Points):
        seen.append(_trained(ctx, net, batch))
        if len(seen) == 2:
            print(sum(seen))
            seen.clear()
