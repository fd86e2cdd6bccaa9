"""Known accelerators by name, for plans on machines that nobody has measured yet.

Peaks, memory and links are the makers' data sheets: dense bf16 operations, NVLink or PCIe per direction,
network adapters of the usual node of eight. What training reaches of them is taken from published runs where
there are any (`python -m benchmarks.planner --published` compares) and else from those of the generation.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from elastic_train.errors import ConfigError
from elastic_train.planner.hardware import Hardware, Link

INSIDE_SHARE, BETWEEN_SHARE = 0.75, 0.8
"""Of a link's nominal rate, what a ring of NCCL reaches."""
INSIDE_S, BETWEEN_S = 4e-6, 1.2e-5
"""Latency of a message of a ring."""
OVERLAP = 0.95
"""Streams of their own gather and reduce while a rank computes; the first unit and the last have nothing to
hide behind."""
UPDATE_BYTES = 32.0
"""That Adam reads and writes of an element: parameter, gradient and two moments of float32, and a result."""


PLAIN = Hardware(inside=Link(latency_s=1e-4, bytes_per_s=5e9), between=Link(latency_s=1e-4, bytes_per_s=1e9))
"""Machines of which nothing is known: candidates are compared, nothing is promised."""
PLAIN_FLOPS_PER_S = 5e10
"""What a core of a CPU computes there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One accelerator and its links. Rates in units per second."""

    peak_flops: float
    achieved: float  # share of the peak that the matrices of training reach, compiled or not
    memory_bytes: int
    memory_bytes_per_s: float
    inside_bytes_per_s: float  # of one accelerator, per direction
    node_bytes_per_s: float  # of a node

    @property
    def flops_per_s(self) -> float:
        return self.peak_flops * self.achieved

    @property
    def hardware(self) -> Hardware:
        """Workers of one accelerator each."""
        return Hardware(
            inside=Link(latency_s=INSIDE_S, bytes_per_s=self.inside_bytes_per_s * INSIDE_SHARE),
            between=Link(latency_s=BETWEEN_S, bytes_per_s=self.node_bytes_per_s * BETWEEN_SHARE),
            memory_bytes=self.memory_bytes,
            update_s=UPDATE_BYTES / self.memory_bytes_per_s,
            overlap=OVERLAP,
        )


def _of(tflops: float, achieved: float, gib: int, memory: float, inside: float, node: float) -> Accelerator:
    """Bandwidths in GB/s."""
    return Accelerator(
        peak_flops=tflops * 1e12,
        achieved=achieved,
        memory_bytes=gib << 30,
        memory_bytes_per_s=memory * 1e9,
        inside_bytes_per_s=inside * 1e9,
        node_bytes_per_s=node * 1e9,
    )


ACCELERATORS = MappingProxyType(
    {
        "v100": _of(125, 0.4, 32, 900, 150, 12.5),
        "t4": _of(65, 0.35, 15, 320, 12, 6.25),
        "a10g": _of(70, 0.45, 22, 600, 24, 12.5),
        "l4": _of(121, 0.4, 22, 300, 24, 12.5),
        "l40s": _of(362, 0.4, 44, 864, 24, 25),
        "a100-40": _of(312, 0.5, 39, 1555, 300, 100),
        "a100-80": _of(312, 0.5, 79, 2039, 300, 200),
        "h100": _of(989, 0.39, 79, 3350, 450, 400),
        "h100-96": _of(989, 0.39, 94, 2400, 450, 400),
        "h200": _of(989, 0.4, 140, 4800, 450, 400),
        "b200": _of(2250, 0.39, 178, 8000, 900, 400),
    }
)
"""By the name that `elastic-train plan --hardware` takes."""

RAY_NAMES = MappingProxyType(
    {
        "V100": "v100",
        "T4": "t4",
        "A10G": "a10g",
        "L4": "l4",
        "L40S": "l40s",
        "A100": "a100-40",
        "A100-40G": "a100-40",
        "A100-80G": "a100-80",
        "H100": "h100",
        "H200": "h200",
        "B200": "b200",
    }
)
"""By what Ray calls the accelerator of a node."""


def accelerator(name: str) -> Accelerator:
    """The accelerator of that name; ConfigError where it isn't known."""
    if name not in ACCELERATORS:
        raise ConfigError(
            field="--hardware",
            problem=f"{name!r} is none of {', '.join(ACCELERATORS)}.",
            remedy="Give --memory, --tflops, --inside and --between instead.",
        )
    return ACCELERATORS[name]
