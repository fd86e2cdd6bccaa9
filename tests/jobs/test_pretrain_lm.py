"""The language model job: its options make a valid trainer, and its loss falls."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elastic_train.data.order import SampleOrder
from elastic_train.train.task import Task, check_task

pytestmark = pytest.mark.ring2

JOB = Path(__file__).parents[2] / "jobs" / "pretrain_lm.py"


@pytest.fixture(scope="module")
def job() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("pretrain_lm", JOB)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pretrain_lm"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["pretrain_lm"]


def test_the_options_reach_the_run(job: ModuleType):
    made = job.trainer(max_steps=7, workers="2:5", seed=3, global_size=10, micro_size=1, name="lm")
    assert (made.spec.max_steps, made.spec.batch.seed, made.spec.batch.micro_batches) == (7, 3, 10)
    assert (made.spec.min_workers, made.spec.max_workers, made.spec.name) == (2, 5, "lm")
    check_task(made.task)


@pytest.mark.parametrize("tied", [False, True])
def test_forty_steps_lower_the_loss(job: ModuleType, tied: bool):
    made = job.trainer(size="nano", seq_len=32, max_steps=40, tied=tied, micro_size=12, lr=1e-2)
    losses = single_process(made.task, SampleOrder(len(made.task.dataset()), made.spec.batch), steps=40)
    assert losses[0] == pytest.approx(5.58, abs=0.1)
    assert sum(losses[-5:]) / 5 < 3.9


def test_the_rate_warms_up_and_falls_to_a_tenth(job: ModuleType):
    task = job.trainer(max_steps=100, lr=1.0).task
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, rates = task.schedule(optimizer), []
    for _ in range(101):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[100] == pytest.approx(0.1)


def test_weights_decay_and_scales_do_not(job: ModuleType):
    task = job.trainer(size="nano").task
    model = task.model()
    decayed, plain = task.optimizer(model.named_parameters()).param_groups
    assert {p.ndim for p in plain["params"]} == {1}
    assert {p.ndim for p in decayed["params"]} == {2}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_held_out_windows_are_never_trained_and_parquet_is_text(job: ModuleType, tmp_path: Path):
    pq.write_table(pa.table({"text": [f"line {i}" for i in range(100)]}), tmp_path / "t.parquet")
    task = job.trainer(data=str(tmp_path / "t.parquet"), seq_len=16, evaluate_every=5).task
    held_out = task.evaluation().dataset
    assert (len(task.dataset()), len(held_out)) == (36, 64)
    assert bytes(held_out[0][1:8].tolist()) == b"line 36"
    assert job.trainer().task.evaluation() is None


def test_packed_documents_are_whole_and_train(job: ModuleType, tmp_path: Path):
    texts = [f"document number {i % 7}" for i in range(60)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "t.parquet")
    for data in (tmp_path / "t.parquet", tmp_path / "files"):
        if not data.suffix:
            data.mkdir()
            for i, text in enumerate(texts):
                (data / f"{i:02}.txt").write_text(text)
        made = job.trainer(data=str(data), size="nano", seq_len=63, packed=True, lr=1e-2)
        window = made.task.dataset()[0]
        assert window["documents"].max() == 3
        assert bytes(window["tokens"][1:18].tolist()) == b"document number 0"
    task = made.task
    model, optimizer = task.model(), None
    torch.manual_seed(0)
    optimizer = task.optimizer(model.named_parameters())
    batch = {k: torch.from_numpy(v)[None] for k, v in window.items()}
    losses = []
    for _ in range(20):
        total, count = task.loss(model(batch["tokens"], batch["documents"]), batch)
        assert int(count) == 3 * 18
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / count.item())
    assert losses[-1] < losses[0] / 2


def single_process(task: Task, order: SampleOrder, *, steps: int) -> list[float]:
    """Mean loss of each step of a plain loop."""
    torch.manual_seed(0)
    model, dataset = task.model(), task.dataset()
    optimizer = task.optimizer(model.named_parameters())
    losses: list[float] = []
    for step in range(1, steps + 1):
        (micro,) = order.micro_batches(step)
        tokens = torch.stack([torch.from_numpy(dataset[i]) for i in micro.ids])
        total, count = task.loss(model(tokens), tokens)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / count.item())
    return losses
