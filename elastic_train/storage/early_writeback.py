"""Start writeback of a file early, so that fsync has less to do.

Linux alone has a call for it, sync_file_range(2), and Python no name for that. It is a hint: durability comes
from fsync, and a system without it is only slower.
"""

from __future__ import annotations

import ctypes
import sys

WRITE = 2
"""SYNC_FILE_RANGE_WRITE: start writing dirty pages of the range, and don't wait."""


def begin_writing(file: int, start: int, length: int) -> None:
    """Let the device begin with a range of an open file. Never fails."""
    if _CALL is not None:
        _CALL(file, start, length, WRITE)


def _call() -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux"):
        return None
    found = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found


_CALL = _call()
