"""What is claimed of computing on a device; what the CPU computes is what it is held to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check.bench import (
    ALONE,
    NEAR,
    OF_TWO,
    SPEC,
    STEPS,
    TASK,
    Bench,
    Unlike,
    far_apart,
    losses_of,
    plan_of,
)
from benchmarks.problem import LEARNING_RATE, Problem, Tokens
from elastic_train.checkpoint.merging import merged
from elastic_train.geometry.box import Box
from elastic_train.geometry.digest import box_digest, combine
from elastic_train.geometry.fragments import Fragments
from elastic_train.models.llama import Llama
from elastic_train.models.loss import next_token_loss
from elastic_train.models.sizes import size
from elastic_train.testing.gang import Gang
from elastic_train.testing.gang_member import call, take
from elastic_train.train.declaration.loop_task import LoopTask
from elastic_train.train.member import StepReport
from elastic_train.train.model.rng import preserved, seed_all
from elastic_train.train.task import Evaluation

NEAR_BF16 = 5e-2


def plans(bench: Bench) -> dict[str, Any]:
    """Every kind of plan has the losses and the state of one process on the CPU."""
    worst, gang = 0.0, bench.gang()
    for mesh in bench.meshes:
        gang.form(plan_of(gang, mesh))
        worst = max(worst, bench.check_losses([r.loss for r in gang.run()]))
        for name, value in gang.whole().items():
            if not np.allclose(value, bench.state[name], rtol=1e-6, atol=1e-9):
                raise Unlike(f"{name} under {mesh}")
    return {"plans": len(bench.meshes), "largest_difference": worst}


def repeats(bench: Bench) -> dict[str, Any]:
    """The same plan twice gives the same bits."""
    gang = bench.gang(precision="fp32")
    for mesh in bench.meshes:
        runs: list[tuple[list[float], dict[tuple[str, str], np.ndarray]]] = []
        for _ in range(2):
            gang.form(plan_of(gang, mesh))
            runs.append(([r.loss for r in gang.run()], gang.whole()))
        (first, before), (then, after) = runs
        if first != then or not all(np.array_equal(before[name], after[name]) for name in before):
            raise Unlike(f"{mesh}: losses {first} and {then}")
    return {"plans": len(bench.meshes)}


def mixed(bench: Bench) -> dict[str, Any]:
    """bf16 computes in bfloat16, on parameters that stay float32."""
    gang = bench.gang(precision="bf16")
    gang.form(gang.plan_on(ALONE))
    losses = [r.loss for r in gang.run()]
    kinds = {str(value.dtype) for value in gang.whole().values()}
    if kinds != {"float32"} or losses == bench.losses:
        raise Unlike(f"parameters of {kinds}, losses {losses}")
    return {"largest_difference": bench.check_losses(losses, near=NEAR_BF16)}


def moves(bench: Bench) -> dict[str, Any]:
    """A run goes from plan to plan without a bit of its state changed, in the same processes."""
    gang, losses, origin = bench.gang(), list[float](), None
    meshes = [OF_TWO[0], OF_TWO[4], OF_TWO[1], OF_TWO[2], OF_TWO[3], ALONE]
    seconds: list[float] = []
    for number, mesh in enumerate(meshes, start=1):
        before = gang.whole() if origin is not None else {}
        began = time.monotonic()
        gang.form(plan_of(gang, mesh), None, origin)
        seconds.append(time.monotonic() - began)
        after = gang.whole()
        if not all(np.array_equal(before[name], after[name]) for name in before):
            raise Unlike(f"the state changed on the way to {mesh}")
        losses += [r.loss for r in (gang.run() if number == STEPS else gang.pause_at(number))]
        origin = gang.held()
    return {"moves": STEPS - 1, "form_s": max(seconds), "largest_difference": bench.check_losses(losses)}


def digests(bench: Bench) -> dict[str, Any]:
    """The digest that the device computes is that of the bytes on the host."""
    gang = bench.gang(precision="fp32")
    digest = gang.form(gang.plan_on(ALONE))
    host = combine(
        box_digest(
            value.view(f"u{value.itemsize}"),
            tensor=tensor,
            state=state,
            box=Box.whole(value.shape),
            shape=value.shape,
        )
        for (tensor, state), value in gang.whole().items()
    )
    if digest != host:
        raise Unlike(f"{digest} where the host has {host}")
    return {}


def checkpoints(bench: Bench) -> dict[str, Any]:
    """What is saved from the device is read on the CPU to the bit, which goes on from there."""
    mesh = bench.meshes[-1]
    gang = bench.gang(max_steps=3)
    gang.form(plan_of(gang, mesh))
    gang.run()
    expected = gang.whole()
    saved = bench.pool.run(take, "saved", ranks=gang.processes)
    document = merged([own[-1][2] for own in saved])
    pieces = [piece for own in saved for piece in own[-1][1]]
    host = Gang(bench.host, TASK, SPEC)
    host.join(host.plan_on(ALONE), [0])
    names = {(t, s): (t, s, d, shape, Box.whole(shape)) for t, s, d, shape, _, _ in pieces}
    bench.host.run(call, "forming.needs", Fragments.of(names.values()))
    boxes = Fragments.of((t, s, d, shape, box) for t, s, d, shape, box, _ in pieces)
    bench.host.run(call, "forming.fill", boxes, [np.frombuffer(data, np.uint8) for *_, data in pieces])
    bench.host.run(call, "load", document)
    bench.host.run(call, "go")
    found = host.whole()
    if found.keys() != expected.keys() or not all(np.array_equal(found[n], expected[n]) for n in found):
        raise Unlike("the CPU holds other bits")
    worst = bench.check_losses([r.loss for r in host.run()], first=4)
    return {"tensors": len(found), "largest_difference": worst}


def random(bench: Bench) -> dict[str, Any]:
    """The device's generator is seeded and put back with the host's."""
    (same,) = bench.pool.run(_drawn, ranks=[0])
    if not same:
        raise Unlike("the generator was not as before")
    return {}


@dataclass(frozen=True, kw_only=True)
class Evaluated(Problem):
    """Measured on samples that no micro-batch size divides."""

    def evaluation(self) -> Evaluation:
        return Evaluation(dataset=Tokens(length=7, seq_len=self.seq_len), every=2)


def evaluation(bench: Bench) -> dict[str, Any]:
    """Under every kind of plan an evaluation gives what it gives on the CPU, and training doesn't notice."""
    task = Evaluated(seq_len=TASK.seq_len, samples=TASK.samples)
    host = Gang(bench.host, task, SPEC)
    host.form(host.plan_on(ALONE))
    expected = _metrics(host.run())
    worst, gang = 0.0, Gang(bench.pool, task, SPEC)
    for mesh in bench.meshes:
        gang.form(plan_of(gang, mesh))
        reports = gang.run()
        worst = max(worst, bench.check_losses(losses_of(reports)))
        if not np.allclose(_metrics(reports), expected, rtol=NEAR, atol=0.0):
            raise Unlike(f"{mesh}: {_metrics(reports)} where the CPU has {expected}")
    return {"evaluations": len(expected), "largest_difference": worst}


def _metrics(reports: Sequence[StepReport]) -> list[float]:
    return [value for report in reports for _, value in report.metrics]


def loop(ctx: Any) -> None:
    """What a person writes who writes it out: TASK, step by step."""
    model = ctx.model("net", lambda: Llama(size(TASK.size)))
    ctx.optimizer("adam", torch.optim.AdamW, model.parameters(), lr=LEARNING_RATE)
    for batch in ctx.batches(Tokens(length=TASK.samples, seq_len=TASK.seq_len)):
        with ctx.step() as step:
            for micro in batch:
                step.backward(*next_token_loss(model(micro), micro))


def loops(bench: Bench) -> dict[str, Any]:
    """A training loop of one's own has the losses that it has on the CPU, and moves between plans."""
    host = Gang(bench.host, LoopTask(loop), SPEC)
    host.form(host.plan_on(ALONE))
    expected = losses_of(host.run())
    gang, losses, origin = Gang(bench.pool, LoopTask(loop), SPEC), list[float](), None
    meshes = [mesh for mesh in bench.meshes if mesh.dp == mesh.size]
    for number, mesh in enumerate(meshes, start=1):
        gang.form(gang.plan_on(mesh), None, origin)
        last = STEPS * number // len(meshes)
        losses += losses_of(gang.run() if last == STEPS else gang.pause_at(last))
        origin = gang.held()
    return {"moves": len(meshes) - 1, "largest_difference": far_apart(losses, expected)}


# -- in the processes


def _drawn(state: dict[str, Any]) -> bool:
    device = torch.device(state["device"])
    seed_all(11, device)
    expected = torch.randn(8, device=device)
    with preserved(device):
        seed_all(11, device)
        first = torch.randn(8, device=device)
        torch.randn(100, device=device)
    after = torch.randn(8, device=device)
    seed_all(11, device)
    torch.randn(8, device=device)
    return torch.equal(first, expected) and torch.equal(after, torch.randn(8, device=device))
