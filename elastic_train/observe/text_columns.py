"""Text for people: aligned columns."""

from __future__ import annotations

from collections.abc import Iterable


def columns(rows: Iterable[tuple[str, ...]]) -> str:
    """Rows of text as aligned columns, the header first; empty where there is nothing but the header."""
    lines = list(rows)
    if len(lines) < 2:
        return ""
    widths = [max(len(row[i]) for row in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in lines
    )
