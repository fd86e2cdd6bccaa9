"""Several sources as one, in given proportions: every sample of the mixture has its number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_train.data.numbered import NumberedSamples, numbered
from elastic_train.errors import ConfigError

PATTERN = 4096
"""Samples after which the order of sources repeats. A share is exact to one in this many."""


class Mixture:
    """Samples of named sources, interleaved as `weights` say (any positive numbers; None: by their sizes).

    An epoch has `samples` samples; by default as many as it takes until every source was seen whole, and
    those that end sooner begin again. Sample i is always the same one: which source it comes from repeats
    every `PATTERN` samples, and within a source they follow one another, so that memory does not grow with
    the sources.
    """

    def __init__(
        self,
        sources: Mapping[str, NumberedSamples],
        *,
        weights: Mapping[str, float] | None = None,
        samples: int | None = None,
    ):
        if not sources:
            raise ConfigError(field="mixture.sources", problem="there are none.")
        self.sources = {name: numbered(source) for name, source in sources.items()}
        self.weights, self._samples = dict(weights) if weights is not None else None, samples
        self.draws_nothing = all(getattr(s, "draws_nothing", False) for s in self.sources.values())
        if self.weights is not None:
            _check(self.weights, self.sources)
        if samples is not None and samples < 1:
            raise ConfigError(field="mixture.samples", problem=f"must be positive, got {samples}.")
        self._plan: tuple[npt.NDArray[np.int16], npt.NDArray[np.int64], tuple[int, ...], int] | None = None

    def __len__(self) -> int:
        return self._planned()[3]

    def __getitem__(self, index: int) -> Any:
        name, at = self.place(index)
        return self.sources[name][at]

    def place(self, index: int) -> tuple[str, int]:
        """Which source sample `index` comes from, and its number there."""
        pattern, before, lengths, samples = self._planned()
        if not 0 <= index < samples:
            raise IndexError(f"sample {index} of {samples}")
        cycle, slot = divmod(index, PATTERN)
        source = int(pattern[slot])
        seen = cycle * int(before[-1, source]) + int(before[slot, source])
        return list(self.sources)[source], seen % lengths[source]

    def describe(self) -> Any:
        """What the sources say of themselves, with their weights."""
        said = [
            describe() if callable(describe := getattr(source, "describe", None)) else None
            for source in self.sources.values()
        ]
        return (tuple(self.sources), tuple((self.weights or {}).values()), tuple(said))

    def _planned(self) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64], tuple[int, ...], int]:
        """Source by slot, samples of each source before each slot, sizes of the sources, samples in all."""
        if self._plan is None:
            lengths = tuple(len(source) for source in self.sources.values())
            for name, length in zip(self.sources, lengths, strict=True):
                if length == 0:
                    raise ConfigError(field=f"mixture.sources[{name!r}]", problem="it has no samples.")
            weights = lengths if self.weights is None else tuple(self.weights[name] for name in self.sources)
            pattern = _interleaved(np.array(weights, dtype=np.float64))
            chosen = pattern[:, None] == np.arange(len(lengths))
            before = np.zeros((PATTERN + 1, len(lengths)), dtype=np.int64)
            np.cumsum(chosen, axis=0, out=before[1:])
            for name, share in zip(self.sources, before[-1], strict=True):
                if share == 0:
                    raise ConfigError(
                        field=f"mixture.weights[{name!r}]",
                        problem=f"it is less than one sample in {PATTERN}.",
                        remedy="Give it a larger weight or leave it out.",
                    )
            samples = self._samples or max(
                _until(before[:, source], length) for source, length in enumerate(lengths)
            )
            self._plan = (pattern, before, lengths, samples)
        return self._plan

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": None}


def _interleaved(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.int16]:
    """For each slot the source that is furthest behind its share; the first of equals."""
    shares = weights / weights.sum()
    given = np.zeros(len(shares))
    pattern = np.empty(PATTERN, dtype=np.int16)
    for slot in range(PATTERN):
        source = int(np.argmax(shares * (slot + 1) - given))
        pattern[slot] = source
        given[source] += 1
    return pattern


def _until(before: npt.NDArray[np.int64], length: int) -> int:
    """Samples of the mixture until a source was seen `length` times."""
    cycles, rest = divmod(length - 1, int(before[-1]))
    return cycles * PATTERN + int(np.searchsorted(before, rest + 1))


def _check(weights: Mapping[str, float], sources: Mapping[str, NumberedSamples]) -> None:
    if set(weights) != set(sources):
        raise ConfigError(
            field="mixture.weights",
            problem=f"they name {sorted(weights)}, the sources are {sorted(sources)}.",
            remedy="Give one weight to each source.",
        )
    for name, weight in weights.items():
        if not (0 < weight < float("inf")):
            raise ConfigError(
                field=f"mixture.weights[{name!r}]", problem=f"must be a positive number, got {weight}."
            )
