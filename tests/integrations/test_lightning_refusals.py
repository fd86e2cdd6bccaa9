"""What et.lightning does not support is refused by name, before anything starts; what it keeps is kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import elastic_train as et
from elastic_train.errors import ConfigError
from elastic_train.integrations.lightning.entry import REFUSED
from elastic_train.integrations.lightning.hooks import HONOURED
from elastic_train.integrations.lightning.hooks import REFUSED as HOOKS

lightning = pytest.importorskip("lightning", reason="the extra lightning is not installed")
callbacks = lightning.pytorch.callbacks
from tests.tasks.lightning_modules import GAN, VAE, held_out, images, loader  # noqa: E402

pytestmark = [pytest.mark.ring1, pytest.mark.filterwarnings("default")]
DATA, ROOT = torch.utils.data, Path(__file__).parents[2]


def refused(field: str, module: Any = None, given: Any = None, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        et.lightning.trainer(
            VAE() if module is None else module,
            loader(4) if given is None else given,
            held_out(4),
            **{"max_epochs": 1, **options},
        )
    assert field in raised.value.field, raised.value
    return raised.value


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_without_a_meaning_is_refused_by_its_name(name: str) -> None:
    assert refused(name, **{name: 1}).remedy


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_cannot_be_exact_is_refused_by_its_name(name: str) -> None:
    module = type("Mine", (VAE,), {name: lambda self, *given, **said: None})()
    assert refused(f"Mine.{name}", module).remedy


def test_every_hook_of_lightning_is_called_or_refused_or_of_no_fit() -> None:
    from lightning.pytorch.core import hooks

    kinds = (hooks.ModelHooks, hooks.DataHooks, hooks.CheckpointHooks)
    theirs = {name for kind in kinds for name in vars(kind) if not name.startswith("_")}
    of_others = {name for name in theirs if re.search(r"test|predict", name)}
    assert (
        theirs - of_others - {*HONOURED} - {*HOOKS}
        == {"allow_zero_length_dataloader_with_multiple_devices"} & theirs
    )


def test_every_argument_of_lightnings_trainer_is_taken_or_refused() -> None:
    import inspect

    theirs = {*inspect.signature(lightning.Trainer.__init__).parameters} - {"self"}
    ours = {*inspect.signature(et.lightning.trainer).parameters}
    assert theirs - ours - {*REFUSED} == set()


def test_the_page_names_every_hook() -> None:
    page = (ROOT / "docs" / "lightning.md").read_text()
    assert [name for name in (*HONOURED, *HOOKS) if f"`{name}`" not in page] == []


class Stream(DATA.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("train_dataloaders", DATA.DataLoader(Stream())),
        ("sampler", DATA.DataLoader(images(), sampler=DATA.WeightedRandomSampler([1.0] * 48, 48))),
        ("sampler", DATA.DataLoader(images(), sampler=DATA.RandomSampler(images(), replacement=True))),
        ("worker_init_fn", DATA.DataLoader(images(), worker_init_fn=print)),
        ("batch_sampler", DATA.DataLoader(images(), batch_sampler=[[0, 1], [2]])),
        ("train_dataloaders", [1, 2, 3]),
    ],
)
def test_a_loader_that_chooses_its_samples_is_refused(field: str, given: Any) -> None:
    refused(field, given=given)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("precision", {"precision": "bf16-true"}),
        ("val_check_interval", {"val_check_interval": 5, "accumulate_grad_batches": 2}),
        ("val_check_interval", {"val_check_interval": 1.5}),
        ("gradient_clip_algorithm", {"gradient_clip_algorithm": "sum"}),
        ("accumulate_grad_batches", {"accumulate_grad_batches": 0}),
        ("max_epochs", {"max_epochs": -1}),
        ("Mine", {"callbacks": type("Mine", (callbacks.Callback,), {})()}),
        ("Timer", {"callbacks": [callbacks.Timer()]}),
        ("ModelCheckpoint", {"callbacks": [callbacks.ModelCheckpoint(save_top_k=-1)]}),
        ("no_such_option", {"no_such_option": 1}),
    ],
)
def test_a_value_without_a_meaning_is_refused(field: str, options: dict[str, Any]) -> None:
    refused(field, **options)


def test_manual_optimization_takes_no_options_of_automatic() -> None:
    refused("gradient_clip_val", GAN(), gradient_clip_val=1.0)
    refused("dp_shard", GAN(), parallelism=et.Parallelism(dp_shard=2))


def test_more_workers_than_micro_batches_need_a_size() -> None:
    from ray.train import ScalingConfig

    error = refused("micro_size", scaling_config=ScalingConfig(num_workers=(1, 3)))
    assert "1 of 3 workers" in error.problem


class Kept(nn.Module):
    """Has the place of torchmetrics' Metric."""

    def __init__(self) -> None:
        super().__init__()
        import torchmetrics

        self.accuracy = torchmetrics.MeanMetric()


def test_metrics_with_a_state_are_refused_by_their_name() -> None:
    module = VAE()
    module.inner = Kept()
    refused("module.inner.accuracy", module)


class Returns(VAE):
    value: ClassVar[Any] = None

    def configure_optimizers(self) -> Any:
        return self.value(self) if callable(self.value) else self.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("configure_optimizers", None),
        ("configure_optimizers", lambda m: [torch.optim.SGD(m.parameters(), lr=1)] * 2),
        (
            "interval",
            lambda m: {
                "optimizer": (o := torch.optim.SGD(m.parameters(), lr=1)),
                "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(o, 1), "interval": "day"},
            },
        ),
        (
            "monitor",
            lambda m: {
                "optimizer": (o := torch.optim.SGD(m.parameters(), lr=1)),
                "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(o),
            },
        ),
    ],
)
def test_a_shape_of_optimizers_that_lightning_does_not_know_is_refused(field: str, value: Any) -> None:
    module = type("Mine", (Returns,), {"value": staticmethod(value) if callable(value) else value})()
    made = et.lightning.trainer(module, loader(4), max_epochs=1)
    with pytest.raises(ConfigError, match=field):
        made.task.model()
