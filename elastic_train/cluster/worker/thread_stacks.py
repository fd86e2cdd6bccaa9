"""Dump the Python stacks of this process's threads as text."""

from __future__ import annotations

import sys
import threading
import traceback

LINES = 60


def stack_of(thread: str) -> str:
    """The stack of the thread of that name, outermost frame first; "" where there is none.

    The innermost `LINES` lines, taken from another thread while it runs.
    """
    found = next((t for t in threading.enumerate() if t.name == thread), None)
    frame = sys._current_frames().get(found.ident or 0) if found is not None else None
    if frame is None:
        return ""
    lines = "".join(traceback.format_stack(frame)).splitlines()
    return "\n".join(lines[-LINES:])
