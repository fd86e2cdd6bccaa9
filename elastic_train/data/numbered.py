"""Numbered samples: what every data set of a run must offer, and how to get there from a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

from elastic_train.errors import ConfigError

RECIPE = (
    "Number the samples: write the stream to Parquet once and read it with ParquetText or ParquetTokens, put "
    "it into a list where it fits in memory, or give the class __len__() and __getitem__(i)."
)


class NumberedSamples(Protocol):
    """Samples by number: `len(d)` of them, `d[i]` the same for the same i in every process and at any time.

    A source that draws no random numbers in `d[i]` and may be read in a second thread says so with a class
    attribute `draws_nothing = True`; the loader then reads ahead even without processes of its own.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def numbered(dataset: object) -> NumberedSamples:
    """The data set itself, or a ConfigError that says how to number its samples."""
    kind = type(dataset)
    if any(cls.__name__ == "IterableDataset" for cls in kind.__mro__):
        raise ConfigError(field="task.dataset", problem=f"{kind.__name__} is a stream.", remedy=RECIPE)
    if isinstance(dataset, Mapping):
        raise ConfigError(
            field="task.dataset",
            problem=f"a {kind.__name__} has keys, not numbers.",
            remedy="Pass list(d.values()).",
        )
    absent = [name for name in ("__len__", "__getitem__") if not hasattr(kind, name)]
    if absent:
        raise ConfigError(
            field="task.dataset", problem=f"{kind.__name__} has no {' and no '.join(absent)}.", remedy=RECIPE
        )
    return cast(NumberedSamples, dataset)
