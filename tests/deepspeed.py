"""DeepSpeed itself, where `make bench-peers` installed it: checkpoints that it writes, converts and loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import PEERS_PYTHON
from benchmarks.reshard.peer import missing, said

PYTHON = Path(__file__).parents[1] / PEERS_PYTHON


def peer(*words: object) -> dict[str, Any]:
    """What `benchmarks.peers.deepspeed_zero` says. Skips the test where it can't run."""
    why = missing(PYTHON)
    if why:
        pytest.skip(why)
    return said(PYTHON, *words)
