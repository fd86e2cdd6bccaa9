"""Where the parts of a fused dim lie: in equal parts, in given sizes, or as q, k and v with grouped heads."""

from __future__ import annotations

from dataclasses import dataclass

Interval = tuple[int, int]
"""Start and length along a dim."""


@dataclass(frozen=True, slots=True)
class Equal:
    """`parts` parts of one size (gate and up)."""

    parts: int

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError("parts must be at least 1")

    def intervals(self, total: int) -> tuple[tuple[Interval, ...], ...]:
        if total % self.parts:
            raise ValueError(f"{total} elements aren't {self.parts} equal parts")
        size = total // self.parts
        return tuple(((i * size, size),) for i in range(self.parts))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parts of given sizes, in elements."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 0:
            raise ValueError("sizes must be numbers of elements")

    @property
    def parts(self) -> int:
        return len(self.sizes)

    def intervals(self, total: int) -> tuple[tuple[Interval, ...], ...]:
        if sum(self.sizes) != total:
            raise ValueError(
                f"sizes {list(self.sizes)} are {sum(self.sizes)} elements, and there are {total}"
            )
        return tuple(((sum(self.sizes[:i]), size),) for i, size in enumerate(self.sizes))


@dataclass(frozen=True, slots=True)
class Heads:
    """q, k and v of attention with `heads` query heads that share `kv_heads` key and value heads.

    Blocked: all of q, then k, then v. Grouped: for each key head its query heads, the key, the value
    (Megatron-LM, GPT-NeoX).
    """

    heads: int
    kv_heads: int
    grouped: bool = False

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads can't share {self.kv_heads} kv_heads equally")

    @property
    def parts(self) -> int:
        return 3

    def intervals(self, total: int) -> tuple[tuple[Interval, ...], ...]:
        slots = self.heads + 2 * self.kv_heads
        if total % slots:
            raise ValueError(f"{total} elements aren't {self.heads} + 2 * {self.kv_heads} heads of one size")
        size = total // slots
        if not self.grouped:
            q, k = self.heads * size, self.kv_heads * size
            return ((0, q),), ((q, k),), ((q + k, k),)
        share = self.heads // self.kv_heads
        starts = [g * (share + 2) * size for g in range(self.kv_heads)]
        return (
            tuple((s, share * size) for s in starts),
            tuple((s + share * size, size) for s in starts),
            tuple((s + (share + 1) * size, size) for s in starts),
        )


Cuts = Equal | Sizes | Heads
