"""A training run begins with another system's checkpoint and goes on as that system would, under any plan."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from elastic_train.checkpoint.begin import begin
from elastic_train.checkpoint.merging import merged
from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.cluster.worker.restore_shards import restore
from elastic_train.config import Batch, ResumeFrom, RunSpec
from elastic_train.geometry.fragments import Fragments
from elastic_train.planner.plan import Mesh
from elastic_train.storage.fsspec_store import open_store
from elastic_train.testing.gang import Gang
from elastic_train.testing.gang_member import call
from elastic_train.testing.gloo_pool import GlooPool, PoolError
from elastic_train.train.task import Rules, Task
from tests.tasks.fixture_model import HIDDEN, LENGTH, VOCABULARY, Block

pytestmark = pytest.mark.ring2

FIXTURES = Path(__file__).parents[1] / "fixtures"
BATCH = 8
UNINTERRUPTED = [4.738855, 4.667124, 4.713715, 4.790242]
"""Losses of steps 5 to 8 of the run that wrote z1 and z3 after step 4, in DeepSpeed without a stop."""


class Ones(nn.Module):
    """A buffer that DeepSpeed has no file for, because it isn't persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ones", torch.empty(HIDDEN), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.ones)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.ones


class Model(nn.Module):
    """The model that wrote the checkpoints, of one head; `scale` is stored and not used."""

    def __init__(self, name: str = "scale") -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.h = nn.ModuleList([Block(), Block()])
        self.lnf, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.ones = Ones()
        self.name = name
        self.register_buffer(name, torch.ones(3))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.get_buffer(self.name))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens) + self.pos.weight
        for block in self.h:
            x = block(x)
        return self.head(self.ones(self.lnf(x)))


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(1000 + index // BATCH)
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=drawn)[index % BATCH]
        return {"tokens": tokens[:-1], "targets": tokens[1:]}


@dataclass
class Continued(Task):
    buffer: str = "scale"

    def model(self) -> nn.Module:
        return Model(self.buffer)

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        named = list(named_params)
        return torch.optim.AdamW(
            [
                {"params": [p for _, p in named if p.ndim > 1], "lr": 1e-3, "weight_decay": 0.1},
                {"params": [p for _, p in named if p.ndim < 2], "lr": 5e-4, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
        )

    def dataset(self) -> Tokens:
        return Tokens()

    def loss(self, output: torch.Tensor, micro_batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        targets = micro_batch["targets"].flatten()
        return F.cross_entropy(output.flatten(0, 1), targets, reduction="sum"), targets.numel()


def spec(clip: float) -> RunSpec:
    return RunSpec(
        name="continued",
        storage_path="/nowhere",
        batch=Batch(global_size=BATCH, micro_size=2, shuffle=False),
        max_steps=8,
        min_workers=1,
        max_workers=4,
        clip_norm=clip,
    )


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(FIXTURES / "deepspeed_zero_tiny.tar.gz") as archive:
        archive.extractall(target, filter="data")
    return target


def restored(state: dict[str, Any], url: str) -> tuple[int, tuple[str, ...]]:
    run = RunDirectory(open_store(url))
    newest = run.newest()
    assert newest is not None
    filled = restore(state["member"], Checkpoint.of(run, newest))
    state["member"].go()
    return filled.digest, filled.notes


@pytest.mark.parametrize(("name", "mesh"), [("z1", (1, 1)), ("z1", (1, 3)), ("z3", (2, 2))])
def test_the_next_losses_are_those_of_the_uninterrupted_run(
    pool: GlooPool,
    deepspeed: Path,
    tmp_path: Path,
    name: str,
    mesh: tuple[int, int],
) -> None:
    theirs = str(deepspeed / name)
    clip = open_checkpoint(theirs).document["foreign"]["config"]["gradient_clipping"]
    stored = begin(open_store(str(tmp_path)), ResumeFrom(url=theirs), holder="test")
    assert begin(open_store(str(tmp_path)), ResumeFrom(url="/gone"), holder="test") == stored
    gang = Gang(pool, Continued(), spec(clip))
    plan = gang.plan(*mesh)
    gang.join(plan, range(plan.world_size))
    found = pool.run(restored, str(tmp_path), ranks=gang.processes)
    assert len({digest for digest, _ in found}) == 1
    assert found[0][1] == ()
    reports = gang.run()
    assert [r.step for r in reports] == [5, 6, 7, 8]
    assert [r.loss for r in reports] == pytest.approx(UNINTERRUPTED, abs=5e-6)


def test_what_does_not_fit_is_listed_before_anything_is_read(
    pool: GlooPool, deepspeed: Path, tmp_path: Path
) -> None:
    begin(open_store(str(tmp_path)), ResumeFrom(url=str(deepspeed / "p1")), holder="test")
    gang = Gang(pool, Continued("scales"), spec(1.0))
    gang.join(gang.plan(1, 1), [0])
    with pytest.raises(PoolError) as raised:
        pool.run(restored, str(tmp_path), ranks=gang.processes)
    text = str(raised.value)
    assert "scale (buffer) is not in the model (did you mean scales?)" in text
    assert "emb.weight (param) is float32 [101, 35] there and float32 [101, 32] in the model" in text


class Chain(nn.Module):
    """Blocks, and behind them a buffer that was drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), Shift()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


class Staged(Continued):
    def model(self) -> nn.Module:
        return Chain()

    def parallelize(self) -> Rules:
        return Rules(stages=("blocks.*",))


def filled_without(state: dict[str, Any], name: str, table: Fragments, arrays: list[Any]) -> set[str]:
    """The names that a rank needs of a foreign state that lacks one; what it needs is filled."""
    member = state["member"]
    rows = range(len(table))
    had = {(table.names[int(table.key[row])], table.box(row)): arrays[row] for row in rows}
    keyed = [(*table.names[key], table.dtypes[key], table.shapes[key]) for key in map(int, table.key)]
    lacking = Fragments.of((*keyed[row], table.box(row)) for row in rows if keyed[row][0] != name)
    needs = member.forming.needs(lacking, foreign=True)
    keys = [(needs.names[int(needs.key[row])], needs.box(row)) for row in range(len(needs))]
    member.forming.fill(needs, [had[key] for key in keys])
    return {fqn for (fqn, _), _ in keys}


def test_a_stage_whose_buffer_a_foreign_state_lacks_has_its_initial_value(pool: GlooPool) -> None:
    """One stage of two lacks it, and both build the model for it together."""
    gang = Gang(pool, Staged(), spec(1.0))
    plan = gang.plan_on(Mesh(pp=2), stages=((0, 2), (2, 3)))
    gang.form(plan)
    before, generation = gang.whole(), gang.generation
    tables = pool.run(call, "held.table", generation, ranks=(0, 1))
    arrays = [pool.run(call, "held.read", generation, 0, t, ranks=[r])[0] for r, t in enumerate(tables)]
    document = merged(pool.run(call, "document", generation, ranks=(0, 1)))
    everything = Fragments.concat(tables)
    flat = [array for own in arrays for array in own]
    gang.join(plan, (0, 1))
    needed = pool.run(filled_without, "last.shift", everything, flat, ranks=(0, 1))
    assert [sorted({name.split(".")[1] for name in names}) for names in needed] == [["0", "1"], ["2"]]
    pool.run(call, "load", {**document, "foreign": {}}, ranks=(0, 1))
    pool.run(call, "forming.digest", ranks=(0, 1))
    pool.run(call, "go", ranks=(0, 1))
    after = gang.whole()
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
