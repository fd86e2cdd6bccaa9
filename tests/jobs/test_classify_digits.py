"""The image job: its augmentation depends on the seed alone, and it learns."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from elastic_train.data.order import SampleOrder

pytest.importorskip("sklearn", reason="scikit-learn ships the images of this job")
pytestmark = pytest.mark.ring2

JOB = Path(__file__).parents[2] / "jobs" / "classify_digits.py"


@pytest.fixture(scope="module")
def job() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("classify_digits", JOB)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["classify_digits"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["classify_digits"]


def test_an_image_is_the_same_under_the_same_seed_and_training_alone_changes_it(job: ModuleType):
    train, held_out = job.Digits(train=True), job.Digits(train=False)
    assert (len(train), len(held_out)) == (1500, 297)
    first, second = (seeded(train, 3) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(train[3][0], train[3][0])
    assert torch.equal(held_out[3][0], held_out[3][0])


def test_sixty_steps_recognise_most_of_the_held_out_images(job: ModuleType):
    made = job.trainer(micro_size=48, lr=1e-2)
    task = made.task
    torch.manual_seed(0)
    model, dataset = task.model(), task.dataset()
    optimizer = task.optimizer(model.named_parameters())
    order = SampleOrder(len(dataset), made.spec.batch)
    for step in range(1, 61):
        (micro,) = order.micro_batches(step)
        batch = gather(dataset, micro.ids)
        total, count = task.loss(model(batch[0]), batch)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    held_out = task.evaluation().dataset
    batch = gather(held_out, range(len(held_out)))
    correct, count = task.evaluation().metric(model(batch[0]), batch)["accuracy"]
    assert correct.item() / count > 0.8


def seeded(dataset: torch.utils.data.Dataset, index: int) -> torch.Tensor:
    torch.manual_seed(11)
    return dataset[index][0]


def gather(
    dataset: torch.utils.data.Dataset, ids: range | tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*(dataset[i] for i in ids), strict=True)
    return torch.stack(images), torch.stack(labels)
