"""Patterns that select tensors by name: text with captures, the same text writes names back.

`{l}` is one part of a dotted name, `{p...}` one or more parts, `{p:q|k|v}` one of the listed words. A capture
that occurs twice must have the same value in both places; what it may be is said in one of them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_CAPTURE = re.compile(r"\{([A-Za-z_]\w*)(\.\.\.|:[^{}]*)?\}")


@dataclass(frozen=True, slots=True)
class Pattern:
    """`text` as it was written; ValueError says what is wrong with it."""

    text: str
    captures: tuple[str, ...] = field(init=False, compare=False)
    _regex: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts: list[str] = []
        captures: dict[str, None] = {}
        end = 0
        for found in _CAPTURE.finditer(self.text):
            parts.append(re.escape(self.text[end : found.start()]))
            end = found.end()
            name, kind = found.group(1), found.group(2)
            if name in captures:
                parts.append(f"(?P={name})")
                continue
            captures[name] = None
            parts.append(f"(?P<{name}>{_body(kind)})")
        parts.append(re.escape(self.text[end:]))
        rest = _CAPTURE.sub("", self.text)
        if not self.text or "{" in rest or "}" in rest:
            raise ValueError(f"{self.text!r} is no pattern: write {{l}}, {{path...}} or {{p:q|k|v}}")
        object.__setattr__(self, "captures", tuple(captures))
        object.__setattr__(self, "_regex", re.compile("".join(parts)))

    @property
    def kinds(self) -> dict[str, str]:
        """What captures may be, where it is said: `...` or `:q|k|v`."""
        return {name: kind for name, kind in _CAPTURE.findall(self.text) if kind}

    def with_kinds(self, kinds: Mapping[str, str]) -> Pattern:
        """The pattern with kinds for captures that say none."""
        return Pattern(_CAPTURE.sub(lambda f: f"{{{f[1]}{f[2] or kinds.get(f[1], '')}}}", self.text))

    def match(self, name: str) -> dict[str, str] | None:
        """The captures of a name, or None."""
        found = self._regex.fullmatch(name)
        return None if found is None else found.groupdict()

    def name(self, captures: Mapping[str, str]) -> str:
        """The name with these captures."""
        return _CAPTURE.sub(lambda found: captures[found.group(1)], self.text)


def near(name: str, known: Iterable[str], *, most: int = 3) -> str:
    """`; did you mean ...?` with the nearest known names, or nothing."""
    found = difflib.get_close_matches(name, sorted(set(known)), n=most, cutoff=0.5)
    return f"; did you mean {', '.join(found)}?" if found else ""


def _body(kind: str | None) -> str:
    if kind is None:
        return r"[^.]+"
    if kind == "...":
        return r".+"
    return "|".join(re.escape(word) for word in kind[1:].split("|"))
