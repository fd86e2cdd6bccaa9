"""Memory and speed that the planner predicts for published runs on GPUs, beside what was measured there.

The whole chain is judged: a micro-batch of the model is traced without memory, as for any job, and the mesh
of the run is scored on the named accelerator. One run of each technique (eager, compiled, float8, Megatron's
kernels) sets the rate of matrices; its own speed is not judged.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import elastic_train as et
from benchmarks import record
from benchmarks.planner.published_runs import PUBLISHED, PublishedRun
from benchmarks.planner.rank_correlation import rank_correlation
from elastic_train.config import Parallelism, RunSpec
from elastic_train.models.llama import Llama
from elastic_train.models.loss import next_token_loss
from elastic_train.models.sizes import LlamaConfig
from elastic_train.planner.accelerators import accelerator
from elastic_train.planner.choose_plan import choose
from elastic_train.planner.model_shape import Layer, ModelShape
from elastic_train.planner.plan import WorkerSlot
from elastic_train.planner.problem import Problem
from elastic_train.planner.scoring import Scored
from elastic_train.train.profile import profiled_shape

NODE = 8
FUSED = {"eager": 1.0, "compiled": 0.45, "float8": 0.45, "megatron": 0.45}
"""Bytes that are still read and written where operations on single elements are fused: with this share the
same rate of matrices explains the eager and the compiled run of table 1."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A run with its prediction. `rate`: operations per second of its matrices."""

    run: PublishedRun
    rate: float
    memory_gib: float
    tokens_per_s: float

    @property
    def memory_error(self) -> float | None:
        return None if self.run.memory_gib is None else self.memory_gib / self.run.memory_gib - 1

    @property
    def speed_error(self) -> float:
        return self.tokens_per_s / self.run.tokens_per_s - 1


@dataclass(frozen=True)
class _Pretrain(et.Task):
    config: LlamaConfig
    sequence: int

    def model(self) -> nn.Module:
        return Llama(self.config).to(torch.bfloat16)

    def optimizer(self, named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named_params])

    def dataset(self) -> Any:
        return [torch.zeros(self.sequence, dtype=torch.int64)]

    def loss(self, output: torch.Tensor, micro_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return next_token_loss(output, micro_batch)

    def parallelize(self) -> et.Rules:
        return Llama.rules()


@cache
def traced(config: LlamaConfig, sequence: int, micro: int) -> Mapping[str, ModelShape]:
    """Three blocks, at one operation a second and at one byte a second; the others are alike."""
    spec = RunSpec(
        name="published",
        storage_path="memory://published",
        batch=et.Batch(global_size=micro, micro_size=micro),
        max_steps=1,
        min_workers=1,
        max_workers=1,
    )
    task = _Pretrain(replace(config, layers=3), sequence)
    return {
        "operations": profiled_shape(task, spec, flops_per_s=1.0),
        "bytes": profiled_shape(task, spec, flops_per_s=math.inf, memory_bytes_per_s=1.0),
    }


def shape_of(run: PublishedRun, flops_per_s: float) -> ModelShape:
    """The model of a run at a rate of its matrices: bf16 on masters, moments and gradients of float32."""
    of = traced(run.model, run.sequence, run.micro)
    byte_s = FUSED[run.technique] / accelerator(run.accelerator).memory_bytes_per_s
    layers = [
        replace(
            computing,
            seconds=computing.seconds / flops_per_s + touching.seconds * byte_s,
            dropped_s=computing.dropped_s / flops_per_s + touching.dropped_s * byte_s,
        )
        for computing, touching in zip(of["operations"].layers, of["bytes"].layers, strict=True)
    ]
    before, block, *_, after = layers
    if run.recompute == "operations":
        block = _by_operations(block, run, flops_per_s)
    shape, blocks = of["operations"], range(run.model.layers)
    tensors = [t for t in shape.tensors if t.layer == 0]
    for at in blocks:
        unit = f"layers.{at}"
        mine = (t for t in shape.tensors if t.layer == 1)
        tensors += [replace(t, fqn=t.fqn.replace("layers.0", unit), unit=unit, layer=1 + at) for t in mine]
    tensors += [replace(t, layer=1 + run.model.layers) for t in shape.tensors if t.layer == 4]
    return replace(
        shape,
        tensors=tuple(replace(t, item_bytes=4) for t in tensors),
        layers=(before, *[block] * run.model.layers, after),
        compute_bytes=2,
    )


def _by_operations(row: Layer, run: PublishedRun, flops_per_s: float) -> Layer:
    """torchtitan keeps the first, third, ... product of a block and what attention returns, in bf16."""
    model, tokens = run.model, run.micro * run.sequence
    narrow = model.dim * model.kv_heads // model.heads
    kept = 2 * tokens * (2 * model.dim + narrow + model.hidden + model.dim + model.dim)
    again = 2 * tokens * (model.dim * narrow + model.dim**2 + model.dim * model.hidden)
    attention = 4 * tokens * run.sequence * model.dim
    repeated = row.dropped_s + (again - attention) / flops_per_s
    return replace(row, dropped_bytes=row.activation_bytes - kept, dropped_s=repeated)


def scored(run: PublishedRun, flops_per_s: float) -> Scored:
    """The mesh of a run as the planner sees it."""
    mesh = run.mesh
    slots = tuple(WorkerSlot(worker=f"w{i}", node=f"n{i // NODE}") for i in range(mesh.size))
    axes = {axis: getattr(mesh, axis) for axis in ("dp_replicate", "dp_shard", "tp", "pp")}
    found = choose(
        Problem(
            worker_slots=slots,
            shape=shape_of(run, flops_per_s),
            hardware=replace(accelerator(run.accelerator).hardware, memory_bytes=1 << 50),
            micro_batches=mesh.dp * run.local // run.micro,
            constraints=Parallelism(**axes),
            virtual=(run.virtual,),
            recompute=("selective" if run.recompute == "operations" else run.recompute,),
        )
    )
    if not isinstance(found, tuple):
        raise AssertionError(f"{run.name}: {found.reason}")
    return found[0]


def compare() -> list[Compared]:
    """Every published run, in the order of the list."""
    rates: dict[str, float] = {}
    rows = []
    for run in PUBLISHED:
        if run.calibrates:
            rates[run.technique] = _rate(run)
        found = scored(run, rates[run.technique])
        rows.append(Compared(run, rates[run.technique], _memory(run, found) / 2**30, _speed(run, found)))
    return rows


def headline(rows: list[Compared]) -> dict[str, float]:
    judged = [row for row in rows if not row.run.calibrates]
    memory = [abs(row.memory_error) for row in rows if row.memory_error is not None]
    return {
        "memory_error_median": statistics.median(memory),
        "memory_error_most": max(memory),
        "throughput_error_median": statistics.median(abs(row.speed_error) for row in judged),
        "throughput_error_most": max(abs(row.speed_error) for row in judged),
        "published_rank_correlation": rank_correlation(
            [row.tokens_per_s for row in judged], [row.run.tokens_per_s for row in judged]
        ),
    }


def _memory(run: PublishedRun, found: Scored) -> float:
    """torchtitan keeps the gathered parameters of a stage, which we gather for every micro-batch."""
    memory = found.memory
    if run.mesh.pp == 1:
        return memory.training
    kept = memory.weights * run.mesh.dp_shard // 2  # in bf16
    return memory.training - memory.gathered + kept


def _rate(run: PublishedRun) -> float:
    """The rate of matrices with which the predicted speed is the measured one."""
    low, high = 1e13, 1e16
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _speed(run, scored(run, middle)) < run.tokens_per_s else (low, middle)
    return low


def _speed(run: PublishedRun, found: Scored) -> float:
    return run.mesh.dp * run.local * run.sequence / run.mesh.size / found.cost.step_s


def published(file: Path | None) -> int:
    """Print the table and its headline."""
    rows = compare()
    results = [
        {
            "run": row.run.name,
            "memory_gib": row.memory_gib,
            "published_gib": row.run.memory_gib,
            "memory_error": row.memory_error,
            "tokens_per_s": row.tokens_per_s,
            "published_tokens_per_s": row.run.tokens_per_s,
            "error": None if row.run.calibrates else row.speed_error,
        }
        for row in rows
    ]
    print(record.table(tuple(results[0]), [tuple(row.values()) for row in results]))
    record.finish(record.record("planner_published", results=results, headline=headline(rows)), file)
    return 0
