"""Numbered samples: the interface of a run's data sets, and adapters for streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

from elastic_train.errors import ConfigError

RECIPE = (
    "Number the samples: data.stream.Stream(make) numbers what can be opened again; or write it to Parquet "
    "once and read it with ParquetTable, put it into a list where it fits in memory, or give the class "
    "__len__() and __getitem__(i)."
)


_TABLES = {
    "pandas": 'd.to_dict("records"), or d.to_numpy()',
    "polars": "d.to_dicts(), or d.to_numpy()",
    "pyarrow": "d.to_pylist(), or data.arrow.ArrowRows of its file",
}
"""By the library of a table: how to get its rows."""


class NumberedSamples(Protocol):
    """Samples by number: `len(d)` of them, `d[i]` the same for the same i in every process and at any time.

    A source that draws no random numbers in `d[i]` and may be read in a second thread says so with a class
    attribute `draws_nothing = True`; the loader then reads ahead even without processes of its own.

    Samples that change from epoch to epoch are those of a data set with a method `set_epoch(epoch)`. It is
    called before samples of an epoch are read: d[i] is then a function of the epoch and i. One that is read
    well only in the order of its numbers says so with `sequential = True`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def numbered(dataset: object) -> NumberedSamples:
    """The data set itself, or a ConfigError that says how to number its samples."""
    kind = type(dataset)
    if any(cls.__name__ == "IterableDataset" for cls in kind.__mro__):
        raise ConfigError(field="task.dataset", problem=f"{kind.__name__} is a stream.", remedy=RECIPE)
    if isinstance(dataset, Mapping):
        several = dataset and all(hasattr(type(part), "features") for part in dataset.values())
        raise ConfigError(
            field="task.dataset",
            problem=f"a {kind.__name__} has keys, not numbers.",
            remedy=f"Pass one of its data sets: d[{next(iter(dataset))!r}]."
            if several
            else "Pass list(d.values()).",
        )
    rows = _TABLES.get(kind.__module__.partition(".")[0])
    if rows is not None:
        raise ConfigError(
            field="task.dataset",
            problem=f"a {kind.__name__} has columns and labels, which d[i] would mean.",
            remedy=f"Pass its rows: {rows}.",
        )
    if any(cls.__name__ == "DataLoader" for cls in kind.__mro__):
        raise ConfigError(
            field="task.dataset",
            problem=f"a {kind.__name__} makes batches, which the run does itself.",
            remedy="Pass its data set, loader.dataset, and its collate_fn as Task.collate.",
        )
    absent = [name for name in ("__len__", "__getitem__") if not hasattr(kind, name)]
    if absent:
        raise ConfigError(
            field="task.dataset", problem=f"{kind.__name__} has no {' and no '.join(absent)}.", remedy=RECIPE
        )
    return cast(NumberedSamples, dataset)


def tell_epoch(dataset: object, epoch: int) -> None:
    """Tell a data set, or those that it is made of, the epoch whose samples are read next."""
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
        return
    for inner in _inside(dataset):
        tell_epoch(inner, epoch)


def follows_epochs(dataset: object) -> bool:
    """Whether it, or one that it is made of, has `set_epoch`."""
    return callable(getattr(dataset, "set_epoch", None)) or any(map(follows_epochs, _inside(dataset)))


def read_in_order(dataset: object) -> bool:
    """Whether it, or one that it is made of, is read well only in the order of its numbers."""
    return bool(getattr(dataset, "sequential", False)) or any(map(read_in_order, _inside(dataset)))


def _inside(dataset: object) -> list[object]:
    """What torch's and our own data sets that are made of others hold: Subset, ConcatDataset, Mixture."""
    held = getattr(dataset, "__dict__", {})
    found = [held[name] for name in ("dataset", "texts", "documents") if name in held]
    for name in ("datasets", "sources"):
        several = held.get(name)
        if isinstance(several, Mapping):
            found += several.values()
        elif isinstance(several, list | tuple):
            found += several
    return [part for part in found if hasattr(type(part), "__getitem__")]
