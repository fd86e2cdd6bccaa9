"""Bars of blocked time by system on a logarithmic axis, as SVG: no plotting library is needed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

LEFT, WIDTH, ROW = 450, 420, 26
LEAST_MS = 0.01


def plot(results: Sequence[dict[str, Any]]) -> str:
    """Medians of `blocked_ms`, the systems that saved, by their number of workers and interval."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for found in results:
        if "absent" not in found and found["saves"]:
            name = f"{found['system']}, {found['workers']} x, every {found['every']}"
            groups.setdefault(name, []).append(found)
    rows = [
        (name, statistics.median(r["blocked_ms"] for r in own), any(r["torn"] for r in own))
        for name, own in groups.items()
    ]
    top = max((value for _, value, _ in rows), default=1.0)
    decades = max(math.ceil(math.log10(top / LEAST_MS)), 1)
    height = ROW * (len(rows) + 2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 90}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<text x="{LEFT}" y="16">blocked ms per checkpoint</text>',
    ]
    for decade in range(decades + 1):
        x = LEFT + WIDTH * decade / decades
        lines.append(f'<line x1="{x}" x2="{x}" y1="22" y2="{height - 20}" stroke="#ddd"/>')
        lines.append(f'<text x="{x}" y="{height - 6}" text-anchor="middle">{LEAST_MS * 10**decade:g}</text>')
    for number, (name, value, torn) in enumerate(rows):
        y = ROW * (number + 1)
        long = WIDTH * max(math.log10(max(value, LEAST_MS) / LEAST_MS), 0.01) / decades
        colour = "#c33" if torn else "#36a" if name.startswith("ours") else "#999"
        lines.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        lines.append(f'<rect x="{LEFT}" y="{y + 3}" width="{long:.1f}" height="16" fill="{colour}"/>')
        label = f"{value:.2f}" + (" torn" if torn else "")
        lines.append(f'<text x="{LEFT + long + 5:.1f}" y="{y + 15}">{label}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"
