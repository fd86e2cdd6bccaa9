"""The programs of the documentation, each run as a reader would run it; only sizes and places are others.

What a page leaves to the reader (`build`, `digits`, the parts of a script that stay) is said here, by page.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

import elastic_train as et
from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.cluster.driver.launch import prepare_local_environment
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.cluster.run_reading import records
from elastic_train.observe.ledger import ledger
from elastic_train.storage.fsspec_store import open_store
from elastic_train.testing.single_process_run import train_alone
from tests.test_docs import blocks

pytest.importorskip("sklearn", reason="scikit-learn ships the images of these pages")
pytestmark = pytest.mark.timeout(560)
ROOT = Path(__file__).parents[2]
STEPS = 4
IMPORTS = """
import os
from pathlib import Path

import ray
import torch
import torch.nn.functional as F
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch import nn
from torch.utils.data import TensorDataset

import elastic_train as et
from elastic_train.models.loss import next_token_loss
"""
IMAGES = """
from sklearn.datasets import load_digits

def digits():
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))

def build():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
"""
RAY_TRAIN = """
loss_of = nn.CrossEntropyLoss()
run_config = RunConfig(name="ray_train", storage_path="runs")
"""
ACCELERATE = """
from transformers import get_linear_schedule_with_warmup

loss_of = nn.CrossEntropyLoss()
"""
MY_MODEL = """
from transformers import AutoConfig, AutoModelForCausalLM

if not Path("my_model").exists():
    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, **heads))
    made.save_pretrained("my_model")
tokens = [{"input_ids": torch.arange(i, i + 8) % 64} for i in range(96)]
"""
LIGHTNING = """
from lightning.pytorch.callbacks import EarlyStopping

from jobs.lightning_vae import VAE, Digits
"""
TITAN = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wo = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return x + self.wo(torch.relu(self.wq(x)))

def build():
    return nn.Sequential(nn.Embedding(64, 16), Block(), nn.Linear(16, 64))

def documents():
    return [torch.arange(i, i + 8) % 64 for i in range(256)]
"""
LOOP = """
def build_net():
    return nn.Linear(8, 2)

def make_dataset():
    return [{"image": torch.full((8,), i / 256), "label": torch.tensor(i % 2)} for i in range(256)]

held_out = make_dataset()

class Average:
    def __init__(self, model):
        self.model, self.updates = model, 0
    def update(self):
        self.updates += 1
    def state_dict(self):
        return {"updates": self.updates}
    def load_state_dict(self, state):
        self.updates = state["updates"]
"""
CLOSURE = """
def train(ctx):
    model = ctx.model("net", build_net)
    optimizer = ctx.optimizer("opt", torch.optim.LBFGS, model, max_iter=3)
    for batch in ctx.batches(make_dataset):
        with ctx.step() as step:
{block}

et.ElasticTrainer(train, batch=et.Batch(global_size=16, micro_size=4, seed=0), max_steps=1).fit()
"""
HOOK = """
def train(ctx):
    model = ctx.model("net", build_net)
    optimizer = ctx.optimizer("opt", torch.optim.SGD, model, lr=0.1)
{block}
    for batch in ctx.batches(make_dataset):
        with ctx.step() as step:
            for micro in batch:
                step.backward(F.cross_entropy(model(micro["image"]), micro["label"]))

et.ElasticTrainer(train, batch=et.Batch(global_size=16, micro_size=4, seed=0), max_steps=1).fit()
"""
CARRY = """
layers, batch_size, width = 1, 16, 8
loss_of = nn.MSELoss()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.GRU(width, width, layers, batch_first=True)
    def forward(self, x, hidden):
        return self.cells(x, hidden)

def columns():
    return [(torch.full((5, width), i / 64), torch.full((5, width), -i / 64)) for i in range(64)]

def train(ctx):
    model = ctx.model("net", Net)
    optimizer = ctx.optimizer("opt", torch.optim.SGD, model, lr=0.1)
{block}

batch = et.Batch(global_size=batch_size, micro_size=4, shuffle=False)
et.ElasticTrainer(train, batch=batch, max_steps=1).fit()
"""
FILES = """
noise = torch.zeros(2, 8)

def train(ctx):
    net = ctx.model("net", build_net)
    optimizer = ctx.optimizer("opt", torch.optim.SGD, net, lr=0.1)
{block}

et.ElasticTrainer(train, batch=et.Batch(global_size=16, micro_size=4), max_steps=1).fit()
"""
GRAPH = """
features, labels, edges = torch.eye(40), torch.arange(40) % 7, torch.eye(40) + 0.1
train_nodes = list(torch.arange(32))

class GCN(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)
    def forward(self, features, edges):
        return (edges @ self.layer(features)).log_softmax(-1)

def train(ctx):
{block}

batch = et.Batch(global_size=len(train_nodes), micro_size=8, shuffle=False)
et.ElasticTrainer(train, batch=batch, max_steps=1).fit()
"""
TEXTS = """
for name in ("web", "code"):
    Path(name).mkdir(exist_ok=True)
    for number in range(24):
        Path(name, f"{number}.txt").write_text(f"{name} {number}")
"""
READER = """
{block}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(512, 8), nn.Linear(8, 512)
    def forward(self, tokens):
        return self.head(self.embedding(tokens))

class Read(et.Task):
    def model(self):
        return Net()
    def optimizer(self, named_params):
        return torch.optim.SGD([p for _, p in named_params], lr=0.1)
    def dataset(self):
        return mixed
    def loss(self, output, micro_batch):
        return next_token_loss(output, micro_batch["tokens"], micro_batch["documents"])

et.ElasticTrainer(Read(), batch=et.Batch(global_size=8, micro_size=2), max_steps=1).fit()
"""
SEQUENCES = """
{block}
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward, self.outward, self.mix = nn.Linear(8, 24), nn.Linear(8, 8), Mix()
    def forward(self, x):
        heads = (t.unflatten(-1, (2, 4)) for t in self.inward(x).chunk(3, -1))
        return x + self.outward(self.mix(*heads).flatten(-2))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(11, 8), nn.Embedding(6, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList([Block(), Block()])
    def forward(self, tokens):
        x = self.words(tokens) + self.places(et.position_numbers(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)

class Told(Sequences):
    def model(self):
        return Net()
    def optimizer(self, named_params):
        return torch.optim.SGD([p for _, p in named_params], lr=0.1)
    def dataset(self):
        return TensorDataset(torch.randint(11, (8, 6)), torch.randint(11, (8, 6)))

et.ElasticTrainer(Told(), batch=et.Batch(global_size=4, micro_size=2), max_steps=1).fit()
"""
OF_THE_README = {
    "model(self)": "return build()",
    "optimizer(self, named_params)": "return torch.optim.AdamW([p for _, p in named_params], lr=1e-3)",
    "schedule(self, optimizer)": "return torch.optim.lr_scheduler.StepLR(optimizer, 2)",
    "dataset(self)": "return digits()",
    "loss(self, output, micro_batch)": (
        'return F.cross_entropy(output, micro_batch[1], reduction="sum"), len(output)'
    ),
}
"""What stands for the `...` of its methods."""
OTHERS = "docs/from-other-frameworks.md"
NOT_RUN = {
    ("docs/clusters.md", "python", 0): "one option, of a machine in a cloud",
    ("docs/clusters.md", "python", 1): "needs the trackers, which the tests' environment has not",
    ("docs/hf.md", "diff", 0): "an import, by which the tests of the scripts make the other form of each",
    ("docs/hf.md", "python", 0): "options, which the tests of the trainer give",
    ("docs/language.md", "python", 0): "one option, whose checkpoints the tests of importers open",
    ("docs/sizing.md", "python", 0): "run by the tests of the pages",
    ("docs/ray-tune.md", "diff", 0): "the search of jobs/tune_sweep.py, which the tests of faults run",
    ("docs/torchtitan.md", "diff", 0): "needs torchtitan, with which its own tests run the same",
    ("docs/torchtitan.md", "python", 0): "the same, from a checkpoint",
    ("docs/your-own-model.md", "python", 0): "run below, as it stands",
}


@dataclass(frozen=True, kw_only=True)
class Program:
    """A block of a page, what a reader has before it, and where the block stands in it."""

    page: str
    language: str = "python"
    number: int = 0
    before: str = IMAGES
    around: str = "{block}"
    depth: int = 0

    def text(self, here: Path) -> str:
        block = blocks(ROOT / self.page, self.language)[self.number]
        if self.language == "diff":
            block = "\n".join(line[1:] for line in block.splitlines() if line[:1] in ("+", " "))
        for method, body in OF_THE_README.items():
            block = block.replace(f"def {method}: ...", f"def {method}: {body}")
        assert "..." not in block
        block = textwrap.indent(block, " " * 4 * self.depth)
        sized = re.sub(r"max_steps=[\d_]+", f"max_steps={STEPS}", self.around.replace("{block}", block))
        whole = IMPORTS + self.before + sized.replace("s3://bucket/runs", "runs")
        return whole.replace('"my_model"', repr(str(here / "my_model"))).replace('"/data/', f'"{here}/')


PROGRAMS = {
    "README": Program(page="README.md"),
    "your own model": Program(page="docs/your-own-model.md", language="diff"),
    "long sequences": Program(page="docs/your-own-model.md", number=1, around=SEQUENCES),
    "a loop": Program(page="docs/loops.md", before=LOOP),
    "columns of text": Program(page="docs/loops.md", number=1, before=LOOP, around=CARRY, depth=1),
    "L-BFGS": Program(page="docs/loops.md", number=2, before=LOOP, around=CLOSURE, depth=3),
    "a hook that clips": Program(page="docs/loops.md", number=3, before=LOOP, around=HOOK, depth=1),
    "files": Program(page="docs/loops.md", number=4, before=LOOP, around=FILES, depth=1),
    "one batch": Program(page="docs/loops.md", number=5, before=LOOP, around=GRAPH, depth=1),
    "data": Program(page="docs/data.md", before=TEXTS, around=READER),
    "Ray Train": Program(page=OTHERS, language="diff", number=0, before=IMAGES + RAY_TRAIN),
    "Hugging Face": Program(page=OTHERS, language="diff", number=1, before=MY_MODEL),
    "Accelerate": Program(page="docs/hf.md", language="diff", number=1, before=IMAGES + ACCELERATE),
    "Lightning": Program(page="docs/lightning.md", language="diff", before=LIGHTNING),
    "torchtitan": Program(page=OTHERS, language="diff", number=2, before=TITAN),
}


@pytest.mark.ring0
def test_every_block_that_is_a_program_is_run() -> None:
    known = {(program.page, program.language, program.number) for program in PROGRAMS.values()} | {*NOT_RUN}
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    there = {
        (str(page.relative_to(ROOT)), language, number)
        for page in pages
        for language in ("python", "diff")
        for number in range(len(blocks(page, language)))
    }
    assert there == known


@pytest.mark.ring2
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_a_page_trains_in_one_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []

    def fit(self: et.ElasticTrainer) -> SimpleNamespace:
        steps.extend(report.step for report in train_alone(self.task, self.spec))
        return SimpleNamespace(outcome="shown")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(et.ElasticTrainer, "fit", fit)
    (tmp_path / "job.py").write_text(PROGRAMS[name].text(tmp_path))
    runpy.run_path(str(tmp_path / "job.py"))
    assert sorted({*steps}) == [*range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    prepare_local_environment()
    with LocalCluster(nodes=1) as cluster:
        cluster.add_node(cpus=2)
        yield str(cluster.cluster.address)


def ran(line: list[str], address: str, here: Path) -> str:
    """What a command printed that ended well."""
    environment = os.environ | {"RAY_ADDRESS": address, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        line, cwd=here, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps_of(run: Path) -> list[int]:
    """The steps that a run keeps."""
    return sorted(ledger(records(open_store(str(run)))).losses)


@pytest.mark.ring3
@pytest.mark.matrix
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_a_page_runs_on_a_cluster(name: str, address: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(PROGRAMS[name].text(tmp_path))
    ran([sys.executable, "job.py"], address, tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    assert steps_of(run) == [*range(1, STEPS + 1)]


@pytest.mark.ring3
@pytest.mark.matrix
def test_the_whole_program_of_your_own_model_runs_as_it_stands_and_goes_on(
    address: str, tmp_path: Path
) -> None:
    page = ROOT / "docs" / "your-own-model.md"
    block, _ = blocks(page, "python")
    (tmp_path / "digits.py").write_text(block)
    lines = re.findall(r"`((?:python|elastic-train run) digits\.py[^`]*)`", page.read_text())
    assert len(lines) == 2
    for line, steps in zip(lines, (STEPS, 2 * STEPS), strict=True):
        said = ran([*line.split(), "--max-steps", str(steps)], address, tmp_path)
        assert f"step {steps}/{steps}" in said
    assert steps_of(tmp_path / "runs" / "digits") == [*range(1, 2 * STEPS + 1)]
    assert open_checkpoint(str(tmp_path / "runs" / "digits"))["0.weight"]["param"].shape == (64, 64)
