"""What is claimed of training on a device, each claim tried by itself.

As many processes as there are devices, two at the most, each with one of its own, form groups as a run's
workers do, with the library's own members; what the CPU computes is what they are held to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.problem import Problem
from elastic_train.checkpoint.merging import merged
from elastic_train.config import Batch, RunSpec
from elastic_train.geometry.box import Box
from elastic_train.geometry.digest import box_digest, combine
from elastic_train.geometry.fragments import Fragments
from elastic_train.planner.plan import Mesh, Plan
from elastic_train.testing.gang import From, Gang
from elastic_train.testing.gang_member import call, start, take
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.train.model.rng import preserved, seed_all

STEPS = 6
TASK = Problem(seq_len=16, samples=64)
SPEC = RunSpec(
    name="gpu-check",
    storage_path="/nowhere",
    batch=Batch(global_size=8, micro_size=2, seed=7),
    max_steps=STEPS,
    min_workers=1,
    max_workers=2,
    precision="fp64",
    clip_norm=1.0,
)
ALONE = Mesh()
OF_TWO = (Mesh(dp_replicate=2), Mesh(dp_shard=2), Mesh(tp=2), Mesh(cp=2), Mesh(pp=2))
STAGES = ((0, 2), (2, 4))
NEAR, NEAR_BF16 = 1e-9, 5e-2


class Unlike(Exception):
    """A claim does not hold; the words say what was found instead."""


@dataclass(slots=True, eq=False)
class Bench:
    """The processes on the device, one on the CPU, and what that computed."""

    device: str
    pool: GlooPool
    host: GlooPool
    losses: list[float] = field(default_factory=list)
    state: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        return (ALONE, *OF_TWO) if self.pool.size > 1 else (ALONE,)

    def gang(self, **changes: Any) -> Gang:
        return Gang(self.pool, TASK, replace(SPEC, **changes))

    def compute_on_host(self) -> None:
        gang = Gang(self.host, TASK, SPEC)
        gang.form(gang.plan_on(ALONE))
        self.losses, self.state = [r.loss for r in gang.run()], gang.whole()

    def check_losses(self, losses: Sequence[float], first: int = 1, near: float = NEAR) -> float:
        """The largest difference to the CPU's, relative; Unlike above `near`."""
        expected = np.array(self.losses[first - 1 :])
        found = float(np.max(np.abs(np.array(losses) - expected) / np.abs(expected)))
        if not found <= near:
            raise Unlike(f"losses {list(losses)} where the CPU has {expected.tolist()}")
        return found


def plan_of(gang: Gang, mesh: Mesh) -> Plan:
    return gang.plan_on(mesh, stages=STAGES if mesh.pp > 1 else ())


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


def aborted(bench: Bench) -> dict[str, Any]:
    """A group is broken in the middle of a collective, and formed again in the same processes."""
    gang = bench.gang()
    gang.form(plan_of(gang, OF_TWO[0]))
    running = gang.begin_until(1, "vote", 3)
    time.sleep(0.5)  # the other one is in the vote's all-reduce by now
    began = time.monotonic()
    gang.abort()
    for _, error, _ in running.results():
        if not error.startswith("GroupBroken"):
            raise Unlike(f"an aborted group ended with {error!r}")
    took = time.monotonic() - began
    gang.form(plan_of(gang, OF_TWO[1]), None, From(generation=gang.generation, step=2, holders=(0, 1)))
    worst = bench.check_losses([r.loss for r in gang.run()], first=3)
    return {"abort_s": took, "largest_difference": worst}


def killed(bench: Bench) -> dict[str, Any]:
    """A process is killed while the other waits for it; that one goes on with its own state and a new one."""
    gang = bench.gang()
    gang.form(plan_of(gang, OF_TWO[0]))
    running = gang.begin_until(1, "reduce", 3)
    bench.pool.kill(1)
    began = time.monotonic()
    gang.abort([0])
    (_, error, _) = running.results(ranks=[0])[0]
    took = time.monotonic() - began
    if not error.startswith("GroupBroken"):
        raise Unlike(f"the one that was left ended with {error!r}")
    generation = gang.generation
    bench.pool.restart(1)
    bench.pool.run(start, TASK, SPEC, ranks=[1])
    gang.form(plan_of(gang, OF_TWO[1]), None, From(generation=generation, step=2, holders=(0,)))
    worst = bench.check_losses([r.loss for r in gang.run()], first=3)
    return {"abort_s": took, "largest_difference": worst}


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


def memory(bench: Bench) -> dict[str, Any]:
    """Memory that is too small is told with the peak, as the device's own."""
    gang = bench.gang()
    gang.form(gang.plan_on(ALONE))
    try:
        bench.pool.run(_leave_little, ranks=[0])
        (_, error, _) = gang.begin().results()[0]
    finally:
        bench.pool.run(_leave_all, ranks=[0])
    if not error.startswith("DeviceMemoryExceeded"):
        raise Unlike(f"it ended with {error!r}")
    peak = int(error.partition("Tensors took ")[2].partition(" ")[0].replace(",", ""))
    if peak <= 0:
        raise Unlike(error)
    return {"peak_mb": peak / 1e6}


def random(bench: Bench) -> dict[str, Any]:
    """The device's generator is seeded and put back with the host's."""
    (same,) = bench.pool.run(_drawn, ranks=[0])
    if not same:
        raise Unlike("the generator was not as before")
    return {}


class Claim(NamedTuple):
    name: str
    processes: int
    tried: Callable[[Bench], dict[str, Any]]
    on_host: bool = True  # whether the CPU in the device's place can be asked too


CLAIMS = (
    Claim("plans", 1, plans),
    Claim("repeats", 1, repeats),
    Claim("mixed precision", 1, mixed),
    Claim("moves", 2, moves),
    Claim("aborted", 2, aborted),
    Claim("killed", 2, killed),
    Claim("digests", 1, digests),
    Claim("checkpoints", 1, checkpoints),
    Claim("memory", 1, memory, on_host=False),
    Claim("random numbers", 1, random),
)


def tried(device: torch.device, processes: int) -> list[dict[str, Any]]:
    """Every claim: `held` is None for those that need more devices than there are."""
    found: list[dict[str, Any]] = []
    with GlooPool(processes, device.type) as pool, GlooPool(1) as host:
        bench = Bench(device.type, pool, host)
        bench.compute_on_host()
        for claim in CLAIMS:
            found.append(_tried(claim, bench))
    return found


def _tried(claim: Claim, bench: Bench) -> dict[str, Any]:
    said: dict[str, Any] = {"claim": claim.name, "says": (claim.tried.__doc__ or "").strip(), "held": None}
    if claim.processes > bench.pool.size:
        return said | {"why": f"needs {claim.processes} devices"}
    if bench.device == "cpu" and not claim.on_host:
        return said | {"why": "needs a device with a memory of its own"}
    for rank in range(bench.pool.size):
        if not bench.pool.alive(rank):
            bench.pool.restart(rank)
    began = time.monotonic()
    try:
        figures = claim.tried(bench)
    except Exception as error:  # noqa: BLE001 - the report says it, and the next claim is tried
        lines = str(error).strip().splitlines() or [""]
        return said | {"held": False, "why": f"{type(error).__name__}: {lines[-1]}", "whole": str(error)}
    return said | {"held": True, "seconds": time.monotonic() - began, **figures}


# -- in the processes


def _leave_little(state: dict[str, Any]) -> None:
    """A step finds a quarter of a MB. What the allocator has reserved and nobody uses is filled, too."""
    torch.accelerator.empty_cache()
    _, room = torch.accelerator.get_memory_info()
    there = torch.accelerator.memory_reserved() + (2 << 20)
    torch.get_device_module(state["device"]).set_per_process_memory_fraction(there / room)
    filling = state["filling"] = []
    for size in (1 << 20, 1 << 9):
        with suppress(torch.OutOfMemoryError):
            while True:
                filling.append(torch.empty(size, dtype=torch.uint8, device=state["device"]))
    del filling[-512:]


def _leave_all(state: dict[str, Any]) -> None:
    del state["filling"]
    torch.get_device_module(state["device"]).set_per_process_memory_fraction(1.0)


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
