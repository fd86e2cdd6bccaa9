"""Data set with slow reads, so that a run lasts until other machines have joined."""

from __future__ import annotations

import time
from typing import Any

from elastic_train.data.numbered import NumberedSamples


class SlowSamples:
    """A data set whose samples take `seconds` each."""

    def __init__(self, inner: NumberedSamples, seconds: float) -> None:
        self._inner, self._seconds = inner, seconds

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, sample: int) -> Any:
        time.sleep(self._seconds)
        return self._inner[sample]
