"""All claims, each tried by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_check import claims, failures
from benchmarks.gpu_check.bench import Bench
from elastic_train.testing.gloo_pool import GlooPool


class Claim(NamedTuple):
    name: str
    processes: int
    tried: Callable[[Bench], dict[str, Any]]
    on_host: bool = True  # whether the CPU in the device's place can be asked too


CLAIMS = (
    Claim("plans", 1, claims.plans),
    Claim("repeats", 1, claims.repeats),
    Claim("mixed precision", 1, claims.mixed),
    Claim("evaluation", 1, claims.evaluation),
    Claim("loops", 1, claims.loops),
    Claim("moves", 2, claims.moves),
    Claim("digests", 1, claims.digests),
    Claim("checkpoints", 1, claims.checkpoints),
    Claim("random numbers", 1, claims.random),
    Claim("aborted", 2, failures.aborted),
    Claim("killed", 2, failures.killed),
    Claim("replayed", 2, failures.replayed),
    Claim("memory", 1, failures.memory, on_host=False),
    Claim("another plan", 2, failures.another_plan, on_host=False),
    Claim("failed device", 2, failures.failed, on_host=False),
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
