"""Text for people: aligned columns, and no character that a terminal would act on."""

from __future__ import annotations

from collections.abc import Iterable


def plain(text: str) -> str:
    """One line of text with escapes, `\\x1b`, for what can't be printed."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def columns(rows: Iterable[tuple[str, ...]]) -> str:
    """Rows of text as aligned columns, the header first; empty where there is nothing but the header."""
    lines = [tuple(map(plain, row)) for row in rows]
    if len(lines) < 2:
        return ""
    widths = [max(len(row[i]) for row in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in lines
    )
