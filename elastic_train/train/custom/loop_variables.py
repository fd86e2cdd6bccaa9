"""Find local variables that a loop carries between steps: they are lost when it is entered again.

Found in the code of the loop itself, before its first step: a number, text or flag that is there before the
loop over batches, that its body reads before it writes, and writes. The warning is given once.
"""

from __future__ import annotations

import dis
from types import CodeType, FrameType

_PLAIN = (bool, int, float, complex, str)


def carried(frame: FrameType) -> tuple[str, ...]:
    """Their names, where `frame` stands at the head of a `for` loop; none where it does not."""
    plain = {name for name, value in frame.f_locals.items() if value is None or isinstance(value, _PLAIN)}
    accesses = _accesses(frame.f_code, frame.f_lasti)
    return tuple(
        sorted(
            name
            for name in plain
            if name in accesses and accesses[name][0] == "LOAD" and "STORE" in accesses[name]
        )
    )


def _accesses(code: CodeType, at: int) -> dict[str, list[str]]:
    """What the body of the loop whose head is at an instruction does to names, in the order of the code."""
    found: dict[str, list[str]] = {}
    end: int | None = None
    for instruction in dis.get_instructions(code):
        if instruction.offset < at:
            continue
        if end is None:
            if instruction.opname != "FOR_ITER":
                return {}
            end = instruction.argval
            continue
        if instruction.offset >= end:
            break
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        kinds = [part for part in instruction.opname.split("_") if part in ("LOAD", "STORE")]
        if "FAST" in instruction.opname or "DEREF" in instruction.opname:
            for kind, name in zip(kinds, names, strict=False):
                found.setdefault(str(name), []).append(kind)
    return found
