"""The planner against published measurements: GPT-2 of 1.5 B parameters on V100s with links of 10 Gb/s.

Duan et al., "Parcae: Proactive, Liveput-Optimized DNN Training on Preemptible Instances" (NSDI 2024) give the
step times of three meshes on 32 instances, times of messages, and a throughput-optimal mesh for every minute
of four traces. Not given are batch and micro-batch, the time of a block, and the share of the sums of
gradients that backward hides: these are fitted. At 24 and 25 instances two meshes are within 0.5 % of each
other: shares that fit the step times as well (0.14 to 0.25) agree on 87 % of the minutes instead of 92 %.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from elastic_train.config import Parallelism
from elastic_train.planner.choose_plan import choose
from elastic_train.planner.hardware import Hardware, Link
from elastic_train.planner.model_shape import Layer, ModelShape, TensorShape
from elastic_train.planner.plan import WorkerSlot
from elastic_train.planner.problem import Problem
from elastic_train.planner.scoring import Scored

pytestmark = pytest.mark.ring0

HIDDEN, BLOCKS, VOCABULARY, SEQUENCE = 1600, 48, 50257, 1024
MICRO_SIZE, MICRO_BATCHES = 2, 64
BLOCK_S, OVERLAP = 0.01149, 0.18
STEP_S = {(4, 8): 2.94, (2, 16): 3.09, (1, 32): 3.88}  # (data, pipeline): seconds
MESSAGE = Link(latency_s=0.14e-3, bytes_per_s=1e9 / 1.198)
SEGMENTS = ("hh_55_65", "hl_15_25", "lh_80_90", "ll_10_11")


def gpt() -> ModelShape:
    matrices = (("qkv", 3 * HIDDEN, HIDDEN), ("o", HIDDEN, HIDDEN))
    matrices += (("up", 4 * HIDDEN, HIDDEN), ("down", HIDDEN, 4 * HIDDEN))
    tokens = MICRO_SIZE * SEQUENCE
    head_s = BLOCK_S * VOCABULARY / (12 * HIDDEN + 2 * SEQUENCE)
    block = Layer(name="block", seconds=BLOCK_S, activation_bytes=34 * tokens * HIDDEN)
    return ModelShape(
        tensors=(
            TensorShape(fqn="wte", shape=(VOCABULARY, HIDDEN), item_bytes=2),
            TensorShape(fqn="wpe", shape=(SEQUENCE, HIDDEN), item_bytes=2),
            *(
                TensorShape(fqn=f"h.{i}.{name}", shape=(a, b), item_bytes=2, unit=f"h.{i}", layer=1 + i)
                for i in range(BLOCKS)
                for name, a, b in matrices
            ),
            TensorShape(fqn="head", shape=(VOCABULARY, HIDDEN), item_bytes=2, layer=BLOCKS + 1),
        ),
        master_bytes=4,
        micro_size=MICRO_SIZE,
        layers=(
            Layer(name="embedding", seconds=0.0, block=False),
            *[block] * BLOCKS,
            Layer(name="head", seconds=head_s, activation_bytes=2 * tokens * VOCABULARY, block=False),
        ),
        boundary_bytes=2 * tokens * HIDDEN,
    )


def plan(instances: int, **axes: int) -> Scored:
    chosen = choose(
        Problem(
            worker_slots=tuple(WorkerSlot(worker=f"w{i}", node=f"n{i}") for i in range(instances)),
            shape=gpt(),
            hardware=Hardware(inside=MESSAGE, between=MESSAGE, memory_bytes=16 << 30, overlap=OVERLAP),
            micro_batches=MICRO_BATCHES,
            constraints=Parallelism(tp=1, dp_shard=1, **axes),
            virtual=(1,),
            recompute=("none",),
        )
    )
    assert isinstance(chosen, tuple), chosen.reason
    return chosen[0]


def test_step_times_come_out_as_measured_and_in_the_measured_order():
    times = {mesh: plan(32, dp_replicate=mesh[0], pp=mesh[1]).cost.step_s for mesh in STEP_S}
    assert times == pytest.approx(STEP_S, rel=0.02)
    assert sorted(times, key=times.__getitem__) == [(4, 8), (2, 16), (1, 32)]
    best = plan(32).plan.mesh
    assert (best.dp_replicate, best.pp) == (4, 8)


def test_plans_agree_with_the_throughput_optimal_ones_of_the_published_segments():
    folder = os.environ.get("ELASTIC_TRACES")
    if not folder:
        pytest.skip("ELASTIC_TRACES names no folder with the published segments gpt-1.5b_trace_*.txt")
    minutes: Counter[tuple[int, tuple[int, int]]] = Counter()
    for segment in SEGMENTS:
        nodes: set[str] = set()
        for line in (Path(folder) / f"gpt-1.5b_trace_{segment}.txt").read_text().splitlines():
            _, kind, record = json.loads(line)
            changed = set(record["nodes"])
            nodes = nodes | changed if kind == "add" else nodes - changed
            data, pipeline = record["throughput_opt_strategy"]
            minutes[len(nodes), (data, pipeline)] += record["duration"] // 60_000
    agreed, missed = 0, Counter[str]()
    for (instances, theirs), count in minutes.items():
        mesh = plan(instances).plan.mesh
        ours = (mesh.dp_replicate, mesh.pp)
        agreed += count * (ours == theirs)
        missed[f"{instances}: {theirs} and not {ours}"] += count * (ours != theirs)
    share = agreed / minutes.total()
    print(f"agreement on {share:.1%} of {minutes.total()} minutes; missed {dict(+missed)}")
    assert share >= 0.9
