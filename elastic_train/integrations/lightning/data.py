"""Lightning's data loaders as numbered samples: their data set, batch size and collate function are kept, and
the order is the run's.
"""

from __future__ import annotations

import copy
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from elastic_train.errors import ConfigError
from elastic_train.integrations.lightning.hooks import check_data_hooks, of_data, overridden


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """What is used of a data loader. `collate` is None where it is torch's own."""

    dataset: Any
    batch_size: int
    shuffle: bool
    drop_last: bool
    workers: int
    prefetch: int
    collate: Callable[[list[Any]], Any] | None

    @classmethod
    def of(cls, loader: Any, field: str) -> Loaded:
        """ConfigError where it has an order, or samples, that no other worker would know."""
        if not isinstance(loader, DataLoader):
            raise ConfigError(
                field=field, problem=f"{type(loader).__name__} is no torch.utils.data.DataLoader."
            )
        if isinstance(loader.dataset, IterableDataset):
            raise ConfigError(
                field=field,
                problem="an IterableDataset has no numbers: which sample comes at a step could not be said "
                "without reading all before it.",
                remedy="Use a data set with len() and [i], or elastic_train.data.stream.Stream.",
            )
        sampler, batches = loader.sampler, loader.batch_sampler
        if loader.batch_size is None or type(batches) is not BatchSampler:
            raise ConfigError(
                field=f"{field}: batch_sampler",
                problem=f"{type(batches).__name__} chooses the batches, and which samples a step has follows "
                "from the seed and the step here.",
                remedy="Give batch_size and shuffle.",
            )
        if type(sampler) not in (RandomSampler, SequentialSampler) or (
            isinstance(sampler, RandomSampler) and (sampler.replacement or sampler._num_samples is not None)
        ):
            raise ConfigError(
                field=f"{field}: sampler",
                problem=f"{type(sampler).__name__} chooses the samples, and which a step has follows from "
                "the seed and the step here.",
                remedy="Give shuffle=True or False; elastic_train.data.weighted.Weighted(dataset, weights) "
                "draws by weight.",
            )
        if loader.worker_init_fn is not None:
            raise ConfigError(
                field=f"{field}: worker_init_fn",
                problem="processes that load samples may come and go.",
                remedy="Draw from the generators of torch, numpy and random: each sample seeds them.",
            )
        return cls(
            dataset=loader.dataset,
            batch_size=loader.batch_size,
            shuffle=isinstance(sampler, RandomSampler),
            drop_last=bool(loader.drop_last),
            workers=loader.num_workers,
            prefetch=loader.prefetch_factor or 2,
            collate=None if loader.collate_fn is default_collate else loader.collate_fn,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Numbered:
    """A sample of one of the data loaders for validation."""

    loader: int
    index: int
    sample: Any


class HeldOut:
    """A data set for validation. Its samples tell which one they are."""

    def __init__(self, dataset: Any, loader: int) -> None:
        self.dataset, self.loader = dataset, loader

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Numbered:
        return Numbered(loader=self.loader, index=index, sample=self.dataset[index])


class Collate:
    """Makes a micro-batch of samples as their data loader does. Of a validation's it is a dict with the
    batch, the number of its loader, and that of its first sample."""

    def __init__(self, train: Any, held_out: list[Any]) -> None:
        self.train, self.held_out = train, held_out

    def __call__(self, samples: list[Any]) -> Any:
        first = samples[0]
        if not isinstance(first, Numbered):
            return (self.train or default_collate)(samples)
        made = (self.held_out[first.loader] or default_collate)([each.sample for each in samples])
        return {"batch": made, "loader": first.loader, "index": first.index}


class Source:
    """Where the data come from, for training and for validation: data loaders, a LightningDataModule, or the
    module's own methods, whichever is there first.

    A data module goes to the workers as it was given, and is set up there. Two processes of a machine do not
    prepare data at once.
    """

    def __init__(self, module: Any, datamodule: Any, train: Any, held_out: Any) -> None:
        if datamodule is not None and (train is not None or held_out is not None):
            raise ConfigError(
                field="lightning.fit(datamodule=...)",
                problem="data loaders are given too.",
                remedy="Give one of them.",
            )
        check_data_hooks(datamodule)
        self._datamodule: Any = datamodule
        self._train = None if train is None else Loaded.of(train, "train_dataloaders")
        self._held_out = None if held_out is None else _several(held_out)
        asked = {"train_dataloader": train, "val_dataloader": held_out} if datamodule is None else {}
        own = [name for name, given in asked.items() if given is None and overridden(module, name)]
        self._sets_up = bool(own) and overridden(module, "setup")
        without = datamodule is None and train is None
        self._module: Any = module if own or without or overridden(module, "prepare_data") else None
        self._loaded: tuple[Loaded, list[Loaded]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None}

    @property
    def datamodule(self) -> Any:
        return self._datamodule

    def looked_at(self) -> tuple[Loaded, list[Loaded]]:
        """The data loaders, for their sizes: what is set up for it is not sent."""
        given = self._datamodule is None and self._module is None
        return self.loaders() if given else copy.deepcopy(self).loaders()

    def loaders(self) -> tuple[Loaded, list[Loaded]]:
        """The data loader for training and those for validation, in this process."""
        if self._loaded is None:
            with torch.device("cpu"):  # also while the module is built without memory
                self._loaded = self._of_owner()
        return self._loaded

    def training(self) -> Any:
        return self.loaders()[0].dataset

    def held_out(self) -> list[HeldOut]:
        return [HeldOut(each.dataset, number) for number, each in enumerate(self.loaders()[1])]

    def collate(self, samples: list[Any]) -> Any:
        train, held_out = self.loaders()
        return Collate(train.collate, [each.collate for each in held_out])(samples)

    def teardown(self) -> None:
        """The data module's, at the end."""
        if of_data(self._datamodule, "teardown"):
            self._datamodule.teardown("fit")

    def _of_owner(self) -> tuple[Loaded, list[Loaded]]:
        data, module = self._datamodule, self._module
        with _alone():
            if data is not None:
                data.prepare_data()
            if module is not None:
                module.prepare_data()
        if data is not None:
            data.setup("fit")
        elif module is not None and self._sets_up:
            module.setup("fit")
        train, held_out = self._train, self._held_out
        owner: Any = module if data is None else data
        if train is None:
            train = Loaded.of(owner.train_dataloader(), "train_dataloaders")
        if held_out is None:
            held_out = _several(_validation(module, data))
        return train, held_out


def _validation(module: Any, datamodule: Any) -> Any:
    """Lightning's own method raises, or gives None, where nobody defined it."""
    name = "val_dataloader"
    if datamodule is not None:
        return datamodule.val_dataloader() if of_data(datamodule, name) else None
    return module.val_dataloader() if module is not None and overridden(module, name) else None


def _several(held_out: Any) -> list[Loaded]:
    several = held_out if isinstance(held_out, list | tuple) else [] if held_out is None else [held_out]
    return [Loaded.of(each, f"val_dataloaders[{number}]") for number, each in enumerate(several)]


@contextmanager
def _alone() -> Iterator[None]:
    """Of all processes of this machine that ask for it. The lock leaves no file behind."""
    place = os.open(tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)
