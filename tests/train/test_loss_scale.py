"""fp16: each run is the plain loop with torch's own GradScaler, with its skipped steps and its scale."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from elastic_train.config import LossScale, RunSpec
from elastic_train.data.order import SampleOrder
from elastic_train.errors import ConfigError
from elastic_train.testing.gang import Gang
from elastic_train.testing.gang_member import call
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.train.declaration.loop_task import task_of
from elastic_train.train.model.collate import collate
from elastic_train.train.model.loss_scale import Scale
from elastic_train.train.model.rng import Randomness
from tests.train.programs import SAMPLES, STEPS, WAYS, Fit, Net, Points, pytest_raises, spec

pytestmark = pytest.mark.ring2

# Too large at first, so that steps are skipped, and grown while it trains.
HOW = LossScale(init=2.0**21, growth=2.0, backoff=0.125, interval=2)


def fp16() -> RunSpec:
    return replace(spec(4), precision="fp16", loss_scale=HOW, clip_norm=1.0)


class AsTask(Fit):
    pass


class Edited(Fit):
    def gradients(self, gradients: Any) -> None:
        gradients.clip_value_(0.05)


def as_loop(ctx: Any) -> None:
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.AdamW, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward((net(micro["x"]) - micro["y"]).square().mean())


def updates_inside(ctx: Any) -> None:
    net = ctx.model("net", Net)
    optimizer = ctx.optimizer("opt", torch.optim.AdamW, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward((net(micro["x"]) - micro["y"]).square().mean())
            step.update(optimizer)


def plainly(edit: Any) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """Losses, scales after each step, and weights."""
    torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=HOW.init,
        growth_factor=HOW.growth,
        backoff_factor=HOW.backoff,
        growth_interval=HOW.interval,
    )
    data, order, randomness = Points(), SampleOrder(SAMPLES, spec(1).batch), Randomness(net, seed=3)
    losses, scales = list[float](), list[float]()
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        total = 0.0
        for micro in order.micro_batches(step):
            batch = collate([data[i] for i in micro.ids], torch.device("cpu"), torch.float32)
            with randomness.micro_batch(step, micro.index), torch.autocast("cpu", torch.float16):
                loss = (net(batch["x"]) - batch["y"]).square().sum()
            scaler.scale(loss / 8).backward()
            total += float(loss.detach())
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        edit(net.parameters())
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        losses.append(total / 8 if scaler.get_scale() >= before else math.nan)
    return losses, scales, {name: value.detach().numpy() for name, value in net.named_parameters()}


@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=() if w == "2-3-1" else (pytest.mark.matrix,)) for w in WAYS]
)
@pytest.mark.parametrize("made", [AsTask, Edited, as_loop, updates_inside])
def test_fp16_is_a_plain_loop_with_a_scaler(pool: GlooPool, made: Any, way: str) -> None:
    clips = made is Edited
    expected, scales, weights = plainly(
        (lambda p: torch.nn.utils.clip_grad_value_(p, 0.05)) if clips else lambda _: None
    )
    assert any(map(math.isnan, expected))
    assert len(set(scales)) > 2
    gang = Gang(pool, task_of(made() if isinstance(made, type) else made), fp16())
    losses, origin = list[float](), None
    for (replicate, shard), processes, stop in WAYS[way]:
        gang.form(gang.plan(replicate, shard), processes, origin)
        reports = gang.run() if stop == STEPS else gang.pause_at(stop)
        losses += [report.loss for report in {report.step: report for report in reports}.values()]
        origin = gang.held()
        for document in pool.run(call, "document", gang.generation, ranks=processes):
            assert document["scale"][0] == scales[stop - 1]
    np.testing.assert_allclose(losses, expected, rtol=1e-5, equal_nan=True)
    whole = {fqn.removeprefix("net."): v for (fqn, state), v in gang.whole().items() if state == "param"}
    for name, value in weights.items():
        np.testing.assert_allclose(whole[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("finite", [[True] * 9, [False, True, True, False, True, True, True]])
def test_the_scale_moves_as_torchs(finite: list[bool]) -> None:
    how = LossScale(init=3.7, growth=1.7, backoff=0.3, interval=3)
    scale, grown = torch.tensor([3.7]), torch.zeros(1, dtype=torch.int32)
    ours = Scale(value=float(scale))
    for good in finite:
        found = torch.tensor([float(not good)])
        torch._amp_update_scale_(scale, grown, found, how.growth, how.backoff, how.interval)
        ours = ours.after(good, how)
        assert (ours.value, ours.steps) == (float(scale), int(grown))


def test_a_scaler_of_a_loops_own_is_refused(pool: GlooPool) -> None:
    gang = Gang(pool, task_of(scales_itself), fp16())
    with pytest_raises("torch.amp.GradScaler looks at the gradient of one rank"):
        gang.form(gang.plan(1, 1), (0,), None)
        gang.run()


def scales_itself(ctx: Any) -> None:
    net = ctx.model("net", Net)
    optimizer = ctx.optimizer("opt", torch.optim.AdamW, net, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward(scaler.scale((net(micro["x"]) - micro["y"]).square().mean()))
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16", "loss_scale": HOW},
        {"precision": "fp16", "optimizer_in_backward": True},
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replace(spec(1), **options)
