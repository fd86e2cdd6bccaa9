"""Where Lightning finds its data, and what a data module does with them: the same here."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import elastic_train as et
from elastic_train.errors import ConfigError
from elastic_train.integrations.lightning.hooks import REFUSED
from elastic_train.testing.single_process_run import train_alone

L: Any = pytest.importorskip("lightning", reason="the extra lightning is not installed")
from tests.integrations.test_lightning import by_step  # noqa: E402
from tests.tasks.lightning_modules import (  # noqa: E402
    SEED,
    VAE,
    held_out,
    images,
    lightnings_own,
    loader,
)

pytestmark = [pytest.mark.ring1, pytest.mark.filterwarnings("default")]
MICRO, ACCUMULATE, EPOCHS = 4, 3, 2


class Halves(L.LightningDataModule):
    """Made in `setup`, and changed where a batch has arrived."""

    def __init__(self, train: Any) -> None:
        super().__init__()
        self.given, self.prepared, self.held_out = train, False, None

    def prepare_data(self) -> None:
        self.prepared = True

    def setup(self, stage: str) -> None:
        assert self.prepared
        self.held_out = held_out(MICRO)

    def train_dataloader(self) -> Any:
        return self.given

    def val_dataloader(self) -> Any:
        return self.held_out

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 0.5]

    def teardown(self, stage: str) -> None:
        self.held_out = None


class Doubles(VAE):
    """Whose own change of a batch gives way to that of a data module."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2.0]


class Prepares(VAE):
    """Reads in `setup` what it prepared, whoever has the data. The class stands for a disk."""

    disk: ClassVar[list[float]] = []

    def prepare_data(self) -> None:
        Prepares.disk.append(3.0)

    def setup(self, stage: str) -> None:
        assert self.trainer.max_epochs == EPOCHS
        self.weight = nn.Parameter(torch.tensor(Prepares.disk[0]))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx)["loss"] * self.weight}


class Validates(VAE):
    def val_dataloader(self) -> Any:
        return held_out(MICRO)


class Owns(Validates):
    """With all of its data, of which `setup` makes a part."""

    given: Any = None

    def setup(self, stage: str) -> None:
        self.own = self.given

    def train_dataloader(self) -> Any:
        return self.own


def owner(train: Any) -> dict[str, Any]:
    Owns.given = train
    return {}


def divided(train: Any) -> dict[str, Any]:
    made = L.LightningDataModule.from_datasets(images(), images(10, 2), batch_size=MICRO)
    made.train_dataloader = lambda: train
    return {"datamodule": made}


WAYS = {
    "a data module that changes batches": (Doubles, lambda train: {"datamodule": Halves(train)}),
    "a data module of data sets": (VAE, divided),
    "the module's own": (Owns, owner),
    "given, and validated by the module": (Validates, lambda train: {"train_dataloaders": train}),
    "the module's, and others to validate": (
        Owns,
        lambda train: owner(train) | {"val_dataloaders": held_out(MICRO)},
    ),
    "given, and prepared by the module": (
        Prepares,
        lambda train: {"train_dataloaders": train, "val_dataloaders": held_out(MICRO)},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_data_are_found_where_lightning_finds_them(way: str) -> None:
    torch.manual_seed(3)
    kind, data = WAYS[way]
    module = kind()
    said = {"max_epochs": EPOCHS, "accumulate_grad_batches": ACCUMULATE, "seed": SEED}
    ours = et.lightning.trainer(module, **data(loader(MICRO)), **said)
    losses, metrics, _ = by_step(train_alone(ours.task, ours.spec))
    _, noise, theirs = lightnings_own(module, ours.spec.batch, data=data, max_epochs=EPOCHS)
    np.testing.assert_allclose(losses, noise.steps(), rtol=1e-6)
    found = [step["val_loss"] for step in metrics if "val_loss" in step]
    assert len(found) == EPOCHS
    np.testing.assert_allclose(found[-1], float(theirs.callback_metrics["val_loss"]), rtol=1e-6)


@pytest.mark.parametrize("name", sorted(REFUSED.keys() & {*dir(L.LightningDataModule)}))
def test_a_hook_of_a_data_module_that_nobody_calls_is_refused_by_its_name(name: str) -> None:
    module = type("Mine", (Halves,), {name: lambda self, *given, **said: None})(loader(MICRO))
    with pytest.raises(ConfigError) as refused:
        et.lightning.trainer(VAE(), datamodule=module, max_epochs=1)
    assert refused.value.field == f"Mine.{name}"
    assert refused.value.remedy


def test_every_hook_of_a_data_module_is_called_or_refused_or_of_no_fit() -> None:
    theirs = {name for cls in L.LightningDataModule.__mro__ for name in vars(cls)}
    hooks = {name for name in theirs if name.startswith(("on_", "transfer_")) or name.endswith("state_dict")}
    assert hooks - {"on_after_batch_transfer"} <= {*REFUSED}


def test_what_is_no_data_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no LightningDataModule"):
        et.lightning.trainer(VAE(), datamodule=object(), max_epochs=1)
