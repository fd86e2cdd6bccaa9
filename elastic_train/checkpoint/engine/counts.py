"""Counters of the snapshot engine."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """`blocked_s` is what training waited or worked for snapshots, `copy_s` what the copying took in all."""

    begun: int = 0
    delivered: int = 0
    torn: int = 0
    failed: int = 0
    skipped: int = 0
    waited: int = 0
    bytes: int = 0
    blocked_s: float = 0.0
    copy_s: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})
