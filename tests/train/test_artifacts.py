"""Files that a loop leaves with its steps: in storage once each, whatever happened on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_train.config import Batch, RunSpec
from elastic_train.errors import ConfigError, GroupBroken, StorageUnavailable
from elastic_train.storage import outlast
from elastic_train.storage.artifacts import DIRECTORY, keep_newest, steps_of
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.memory_store import MemoryStore
from elastic_train.testing.faulty_store import FaultyStore
from elastic_train.testing.gang import From, Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.single_process_run import train_alone
from elastic_train.train.custom import artifacts
from elastic_train.train.declaration.loop_task import LoopTask
from tests.tasks import loops
from tests.train.programs import Net, Points
from tests.train.test_loops import broken_off

pytestmark = pytest.mark.ring2
STEPS = 7


def spec(storage: Path, name: str) -> RunSpec:
    return RunSpec(
        name=name,
        storage_path=str(storage),
        batch=Batch(global_size=12, micro_size=3, seed=5),
        max_steps=STEPS,
        min_workers=1,
        max_workers=4,
    )


def test_a_pause_in_the_last_step_leaves_what_follows_the_last_batch_to_be_done(
    pool: GlooPool, tmp_path: Path
) -> None:
    gang = Gang(pool, LoopTask(loops.leaves_files), spec(tmp_path, "drained"))
    gang.form(gang.plan(2, 1))
    gang.pause_at(STEPS)
    assert f"{DIRECTORY}/step-{STEPS:010}/model.pt" in written(tmp_path, "drained")


def written(storage: Path, name: str) -> dict[str, bytes]:
    store = open_store(str(storage / name))
    return {path: store.read(path) for path in store.list(DIRECTORY)}


def test_each_step_has_its_files_once_after_kills_and_moves(pool: GlooPool, tmp_path: Path) -> None:
    task = LoopTask(loops.leaves_files)
    train_alone(task, spec(tmp_path, "calm"))
    calm = written(tmp_path, "calm")
    names = {path.partition("/")[2] for path in calm}
    after = {f"step-{step:010}/after.txt" for step in range(1, STEPS + 1)}
    before = {f"step-{step:010}/shown/before.txt" for step in (2, 4, 6)}
    assert names == after | before | {f"step-{STEPS:010}/model.pt"}

    gang = Gang(pool, LoopTask(loops.leaves_files), spec(tmp_path, "rough"))
    gang.form(gang.plan(2, 1), [0, 1])
    broken_off(gang, 0, "backward", 3)  # the rank that brings files
    gang.form(gang.plan(2, 1), [1, 2], From(generation=gang.generation, step=2, holders=(1,)))
    gang.pause_at(4)
    gang.form(gang.plan(3, 1), [2, 3, 1], gang.held())
    gang.run()
    rough = written(tmp_path, "rough")
    assert rough.keys() == calm.keys()
    assert {p: b for p, b in rough.items() if p.endswith("txt")} == {
        p: b for p, b in calm.items() if p.endswith("txt")
    }
    (file,) = (tmp_path / "rough").rglob("model.pt")
    theirs = torch.load(next((tmp_path / "calm").rglob("model.pt")))
    for key, value in torch.load(file).items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-4, atol=1e-6)


def test_what_a_loop_leaves_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "STEPS", 2)
    train_alone(LoopTask(loops.leaves_files), spec(tmp_path, "few"))
    assert list(steps_of(open_store(str(tmp_path / "few")))) == [STEPS - 1, STEPS]
    monkeypatch.setattr(artifacts, "FILES", 0)
    with pytest.raises(Exception, match="step 1 has 1 files"):
        train_alone(LoopTask(loops.leaves_files), spec(tmp_path, "many"))


def test_files_of_a_later_step_that_is_run_again_are_dropped(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    kept = artifacts.Artifacts(lambda: store)
    (kept.of(3) / "a").write_text("3")
    (kept.of(4) / "a").write_text("4")
    kept.enter(3)
    kept.bring(3, uploads=False)
    assert not store.list()
    kept.bring(3, uploads=True)
    assert steps_of(store) == {3: ("artifacts/step-0000000003/a",)}
    assert keep_newest(store, {3}, 1) == {3}


def in_trouble(times: int) -> tuple[FaultyStore, MemoryStore]:
    """A store whose first writes fail."""

    def fails() -> None:
        raise StorageUnavailable(path="artifacts", operation="write", problem="slow down")

    inner = MemoryStore()
    store = FaultyStore(inner, [])
    for call in range(1, times + 1):
        store.before(call, fails)
    return store, inner


def test_files_of_the_end_wait_for_storage_and_others_for_the_next_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outlast, "FIRST_S", 0.01)
    store, inner = in_trouble(4)
    kept, waits = artifacts.Artifacts(lambda: store), list[int]()
    (kept.of(3) / "a").write_text("3")
    kept.bring(3, uploads=True)
    assert not steps_of(inner)
    kept.bring(3, uploads=True, ends_within_s=60.0, waits=lambda: waits.append(1))
    assert steps_of(inner) == {3: ("artifacts/step-0000000003/a",)}
    assert len(waits) == 3
    assert "storage is in trouble" in caplog.text

    store, inner = in_trouble(100)
    kept = artifacts.Artifacts(lambda: store)
    (kept.of(3) / "a").write_text("3")
    caplog.clear()
    kept.bring(3, uploads=True, ends_within_s=0.05)
    assert "the files of step 3 could not be written" in caplog.text

    def broken() -> None:
        raise GroupBroken(generation=1, reason="a rank is lost")

    with pytest.raises(GroupBroken):
        kept.bring(3, uploads=True, ends_within_s=60.0, waits=broken)


def leaves_an_end(ctx: Any) -> None:
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward((net(micro["x"]) - micro["y"]).square().mean())
    (ctx.artifacts / "end").write_text("done")


def test_a_run_in_trouble_ends_with_the_files_of_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlast, "FIRST_S", 0.01)
    store, inner = in_trouble(3)
    task = LoopTask(leaves_an_end)
    task.artifacts = artifacts.Artifacts(lambda: store)
    train_alone(task, spec(tmp_path, "trouble"))
    assert steps_of(inner) == {STEPS: (f"artifacts/step-{STEPS:010}/end",)}


def test_there_is_no_directory_before_the_first_batch(tmp_path: Path) -> None:
    def loop(ctx: Any) -> None:
        ctx.model("net", lambda: torch.nn.Linear(1, 1))
        print(ctx.artifacts)

    with pytest.raises(ConfigError, match="artifacts"):
        train_alone(LoopTask(loop), spec(tmp_path, "early"))
