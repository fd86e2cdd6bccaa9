"""Begin again what storage was too troubled for, for as long as a run bears that."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from elastic_train.errors import StorageUnavailable

T = TypeVar("T")
FIRST_S, CAP_S = 5.0, 60.0
"""From one try to the next: each was tried again for a minute by itself."""


def outlast(
    call: Callable[[], T],
    within_s: float,
    *,
    said: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """What the call returns once storage lets it. StorageUnavailable where that is in trouble for `within_s`
    seconds; any other error at once. `said` hears of each try that failed.
    """
    began, wait_s = clock(), FIRST_S
    while True:
        try:
            return call()
        except StorageUnavailable as error:
            left_s = within_s - (clock() - began)
            if left_s <= 0.0:
                raise
            said(f"storage is in trouble, and may be for {left_s:.0f} s more: {error}")
            sleep(min(wait_s, left_s))
            wait_s = min(2.0 * wait_s, CAP_S)
