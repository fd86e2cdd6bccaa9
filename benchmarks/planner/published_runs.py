"""Published training runs on GPUs, and the models that they trained.

torchtitan: https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md (H100
of 96 GB with 500 W, NVLink, 400 Gb/s per GPU; Llama 3.1 with sequences of 8192), tables 1 and 3 to 5; those
with context parallelism are left out. Micro-batches of its pipelines are not given and taken as one for each
stage, which is its default.

Megatron: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(SC 2021), table 1: A100 of 80 GB, GPT with sequences of 2048 and 51,200 words, full recomputation, which the
operations per second that it gives count too. Micro-batches are not given and taken as one sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastic_train.models.sizes import LlamaConfig
from elastic_train.planner.plan import Mesh, Recompute

Technique = Literal["eager", "compiled", "float8", "megatron"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A run and what was measured of it. `local` samples of `sequence` tokens per data-parallel rank."""

    source: str
    model: LlamaConfig
    sequence: int
    accelerator: str
    technique: Technique
    mesh: Mesh
    local: int
    micro: int
    recompute: Recompute | Literal["operations"]  # torchtitan's own: every second matrix product is kept
    tokens_per_s: float  # of one GPU
    memory_gib: float | None = None
    virtual: int = 1
    calibrates: bool = False  # whether its speed sets the rate of its technique

    @property
    def name(self) -> str:
        size = f"{self.model.dim}x{self.model.layers}"
        return f"{self.source} {size} {self.technique} {self.mesh}" + (
            f" v{self.virtual}" * (self.virtual > 1)
        )


LLAMA_8B = LlamaConfig(dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336, vocabulary=128256)
LLAMA_70B = LlamaConfig(dim=8192, layers=80, heads=64, kv_heads=8, hidden=28672, vocabulary=128256)
LLAMA_405B = LlamaConfig(dim=16384, layers=126, heads=128, kv_heads=8, hidden=53248, vocabulary=128256)


def _titan(
    model: LlamaConfig, technique: Technique, mesh: Mesh, local: int, speed: float, gib: float, **more: object
) -> PublishedRun:
    settings: dict[str, object] = {"micro": local, "recompute": "operations", **more}
    return PublishedRun(
        source="torchtitan",
        model=model,
        sequence=8192,
        accelerator="h100-96",
        technique=technique,
        mesh=mesh,
        local=local,
        tokens_per_s=speed,
        memory_gib=gib,
        **settings,  # pyright: ignore[reportArgumentType]
    )


def _megatron(
    heads: int, hidden: int, layers: int, tp: int, pp: int, gpus: int, batch: int, tflops: float
) -> PublishedRun:
    """A block of GPT has the operations of one of Llama with a feed-forward layer of 8/3 of the width."""
    sequence, vocabulary = 2048, 51200
    dp = gpus // (tp * pp)
    per_token = 96 * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden))
    return PublishedRun(
        source="Megatron",
        model=LlamaConfig(
            dim=hidden,
            layers=layers,
            heads=heads,
            kv_heads=heads,
            hidden=8 * hidden // 3 // 64 * 64,
            vocabulary=vocabulary,
            tied=True,
        ),
        sequence=sequence,
        accelerator="a100-80",
        technique="megatron",
        mesh=Mesh(tp=tp, pp=pp, dp_replicate=dp),
        local=batch // dp,
        micro=1,
        recompute="full",
        tokens_per_s=tflops * 1e12 / per_token,
        calibrates=hidden == 2304,
    )


PUBLISHED = (
    _titan(LLAMA_8B, "eager", Mesh(dp_shard=8), 2, 5762, 82.4, calibrates=True),
    _titan(LLAMA_8B, "compiled", Mesh(dp_shard=8), 2, 6667, 77.0, calibrates=True),
    _titan(LLAMA_8B, "float8", Mesh(dp_shard=8), 2, 8532, 76.8, calibrates=True),
    _titan(LLAMA_8B, "eager", Mesh(dp_shard=128), 2, 5605, 67.0),
    _titan(LLAMA_8B, "compiled", Mesh(dp_shard=128), 2, 6514, 62.0),
    _titan(LLAMA_8B, "float8", Mesh(dp_shard=128), 2, 8380, 61.8),
    _titan(LLAMA_70B, "float8", Mesh(dp_shard=32, tp=8), 16, 829, 71.9, recompute="full"),
    _titan(LLAMA_405B, "float8", Mesh(dp_shard=8, tp=8, pp=8), 32, 100, 82.5, micro=4, recompute="full"),
    _titan(
        LLAMA_405B,
        "float8",
        Mesh(dp_shard=8, tp=8, pp=8),
        32,
        128,
        72.7,
        micro=2,
        recompute="full",
        virtual=2,
    ),
    _megatron(24, 2304, 24, 1, 1, 32, 512, 137),
    _megatron(32, 3072, 30, 2, 1, 64, 512, 138),
    _megatron(32, 4096, 36, 4, 1, 128, 512, 142),
    _megatron(48, 6144, 40, 8, 1, 256, 1024, 135),
    _megatron(64, 8192, 48, 8, 2, 512, 1536, 138),
    _megatron(80, 10240, 60, 8, 4, 1024, 1792, 140),
    _megatron(96, 12288, 80, 8, 8, 1536, 2304, 148),
    _megatron(128, 16384, 96, 8, 16, 1920, 2160, 155),
    _megatron(128, 20480, 105, 8, 35, 2520, 2520, 163),
    _megatron(160, 25600, 128, 8, 64, 3072, 3072, 163),
)
