"""A run of consecutive samples of a data set as a data set: training and held-out samples from one source."""

from __future__ import annotations

from typing import Any

from elastic_train.data.numbered import NumberedSamples


class SourcePart:
    """Samples start .. stop-1 of a data set, counted from its end where negative, as in a slice."""

    def __init__(self, dataset: NumberedSamples, start: int | None = None, stop: int | None = None):
        self.dataset, self.start, self.stop = dataset, start, stop
        self.draws_nothing = bool(getattr(dataset, "draws_nothing", False))

    def __len__(self) -> int:
        return len(self._range())

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.dataset[self._range()[index]]

    def describe(self) -> Any:
        """What the data set says of itself, and which part of it this is."""
        describe = getattr(self.dataset, "describe", None)
        return (describe() if callable(describe) else None, self._range().start, self._range().stop)

    def _range(self) -> range:
        return range(len(self.dataset))[self.start : self.stop]
