"""Evaluation gives one result under every plan and leaves training as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from elastic_train.errors import ConfigError, GroupBroken
from elastic_train.planner.plan import Mesh, Plan, even_shares
from elastic_train.testing.gloo_pool import GlooPool, PerRank
from elastic_train.train.collectives.process_group import Group
from elastic_train.train.model.rng import seed_all
from elastic_train.train.step.evaluate import Evaluator
from elastic_train.train.task import Evaluation
from elastic_train.train.user_code_guard import UserCodeGuard
from tests.tasks.tiny import TinyData, TinyTask, tiny_run

pytestmark = pytest.mark.ring2

SPEC = tiny_run(12, max_steps=10)
ALONE = Mesh()
MESHES = [(1, 1), (3, 1), (1, 3), (2, 2), (1, 4)]


class Task(TinyTask):
    """Holds out `held_out` samples, measured by `metric`."""

    def __init__(
        self, held_out: int = 17, metric: Callable[[Any, Any], Any] | None = None, every: int = 4
    ) -> None:
        super().__init__(batch_norm=True)
        self.held_out, self.metric, self.every = held_out, metric, every

    def evaluation(self) -> Evaluation:
        return Evaluation(dataset=TinyData(self.held_out), metric=self.metric, every=self.every)


def several(output: Tensor, micro_batch: dict[str, Tensor]) -> dict[str, tuple[Any, Any]]:
    right = output.argmax(-1) == micro_batch["targets"]
    return {"right": (right.sum(), right.numel()), "rows": (len(output), 1), "random": (torch.rand(()), 1)}


def irregular(output: Tensor, micro_batch: dict[str, Tensor]) -> dict[str, tuple[Any, Any]]:
    """Another name where the batch is not whole."""
    return {"whole" if len(output) == 3 else "part": (1, 1)}


def build(task: TinyTask) -> nn.Module:
    seed_all(5)
    model = task.model().double()
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        model.batch_norm.running_mean.normal_()
    return model


def evaluator(
    task: Task,
    model: nn.Module,
    mesh: Mesh = ALONE,
    rank: int = 0,
    group: Group | None = None,
    device: str = "cpu",
) -> Evaluator:
    names = tuple(map(str, range(mesh.size)))
    return Evaluator(
        task,
        task.evaluation(),
        SPEC,
        model=model,
        parameters=dict(model.named_parameters()),
        plan=Plan(mesh=mesh, workers=names, nodes=names, shares=even_shares(4, mesh.dp)),
        rank=rank,
        device=torch.device(device),
        group=group,
        guard=UserCodeGuard(
            worker="w",
            node="n",
            rank=rank,
            generation=1,
            broken=lambda: group is not None and group.broken,
        ),
    )


def join(
    state: dict[str, Any], store: tuple[str, int], generation: int, rank: int, mesh: Mesh, task: Task
) -> None:
    host, port = store
    group = Group(
        generation=generation,
        rank=rank,
        world_size=mesh.size,
        store_host=host,
        store_port=port,
        address="127.0.0.1",
        device=state["device"],
    )
    group.form()
    model = build(task).to(state["device"])
    if mesh.dp_shard > 1:
        device_mesh = group.mesh(mesh)["dp_replicate", "dp_shard"]
        for block in model.blocks:
            fully_shard(block, mesh=device_mesh)
        fully_shard(model, mesh=device_mesh, ignored_params={model.gate.value})
    state["group"], state["evaluator"], state["model"] = (
        group,
        evaluator(task, model, mesh, rank, group, state["device"]),
        model,
    )


def run(state: dict[str, Any], step: int) -> dict[str, float]:
    return state["evaluator"].run(step)


def outcome(state: dict[str, Any], step: int) -> str:
    state["started"] = True
    try:
        return str(state["evaluator"].run(step))
    except (ConfigError, GroupBroken) as error:
        return f"{type(error).__name__}: {error}"


def is_sharded(state: dict[str, Any]) -> bool:
    return all(isinstance(p, DTensor) for p in state["model"].parameters() if p.ndim)


def leave(state: dict[str, Any]) -> None:
    state.pop("evaluator").close()
    state.pop("group").destroy()
    del state["model"]


def has_started(state: dict[str, Any]) -> bool:
    return state.get("started", False)


def break_group(state: dict[str, Any]) -> None:
    state["group"].break_()


def formed(pool: GlooPool, generation: int, mesh: Mesh, task: Task) -> range:
    ranks = range(mesh.size)
    store = (pool.store_host, pool.store_port)
    pool.run(join, store, generation, PerRank(ranks), mesh, task, ranks=ranks)
    return ranks


def test_every_sample_counts_once_and_padding_not_at_all() -> None:
    task = Task(held_out=17)
    model = build(task)
    data = TinyData(17)
    total, count = 0.0, 0
    model.eval()
    for i in range(17):
        sample = {name: value[None] for name, value in data[i].items()}
        loss, counted = task.loss(model(sample["tokens"]), sample)
        total, count = total + loss.item(), count + int(counted)
    assert evaluator(task, model).run(4) == {"eval_loss": pytest.approx(total / count, rel=1e-12)}


def test_an_evaluation_is_seen_to_move_with_every_micro_batch() -> None:
    """So that one that takes for ever is told from one that stands still."""
    task, marks = Task(held_out=17), list[tuple[str, int, int]]()
    evaluator(task, build(task)).run(4, lambda *mark: marks.append(mark))
    assert marks == [("evaluation", 4, micro) for micro in range(-(-17 // SPEC.batch.micro_size))]


@pytest.mark.parametrize("held_out", [17, 4])
def test_every_plan_gives_the_same_result(pool: GlooPool, held_out: int) -> None:
    task = Task(held_out=held_out, metric=several)
    alone = evaluator(task, build(task)).run(4)
    assert alone["rows"] == held_out / -(-held_out // 3)
    for replicate, shard in MESHES:
        ranks = formed(pool, next(pool.generations), Mesh(dp_replicate=replicate, dp_shard=shard), task)
        assert pool.run(run, 4, ranks=ranks) == [alone] * len(ranks)
        if shard > 1:
            assert pool.run(is_sharded, ranks=ranks) == [True] * len(ranks)
        pool.run(leave, ranks=ranks)


def test_names_that_differ_between_micro_batches_are_refused_on_every_rank(pool: GlooPool) -> None:
    task = Task(held_out=4, metric=irregular)
    with pytest.raises(ConfigError, match=r"same names.*\['whole'\] and \['part'\]"):
        evaluator(task, build(task)).run(4)
    ranks = formed(pool, next(pool.generations), Mesh(dp_replicate=2), task)
    for text in pool.run(outcome, 4, ranks=ranks):
        assert text.startswith("ConfigError: task.evaluation.metric")
    pool.run(leave, ranks=ranks)


def test_a_break_ends_an_evaluation_that_waits_for_an_absent_rank(pool: GlooPool) -> None:
    ranks = formed(pool, next(pool.generations), Mesh(dp_shard=3), Task())
    waiting = pool.call_async(outcome, 4, ranks=[0, 1])
    while not all(pool.control(rank, has_started) for rank in (0, 1)):
        pass
    for rank in ranks:
        pool.control(rank, break_group)
    assert [text.split(":")[0] for text in waiting.results()] == ["GroupBroken"] * 2
    pool.run(leave, ranks=ranks)


def scores(output: Tensor, micro_batch: dict[str, Tensor]) -> dict[str, Any]:
    """For each token its most probable class and the right one, for each sample its name."""
    names = [f"sample of {int(t.sum())}" for t in micro_batch["tokens"]]
    score = output.softmax(-1)[..., 0].round(decimals=9)  # a tie is one whatever a kernel rounds
    return {"score": score, "right": micro_batch["targets"] == 0, "names": names}


def of_all(kept: dict[str, Any]) -> dict[str, float]:
    """The area under the curve, which is no mean of those of parts, and the order of what was kept."""
    score, right = kept["score"].flatten(), kept["right"].flatten()
    above = (score[right][:, None] > score[~right]).double().mean()
    first = float(kept["names"][0].removeprefix("sample of "))
    return {"auc": above, "samples": len(kept["names"]), "first": first, "drawn": torch.rand(())}


class Ranked(Task):
    def evaluation(self) -> Evaluation:
        return Evaluation(dataset=TinyData(self.held_out), every=4, keep=scores, summary=of_all)


@pytest.mark.parametrize("held_out", [17, 4])
def test_a_metric_of_all_predictions_is_that_of_one_process_under_every_plan(
    pool: GlooPool, held_out: int
) -> None:
    task = Ranked(held_out=held_out)
    model = build(task)
    alone = evaluator(task, model).run(4)
    data = [TinyData(held_out)[i] for i in range(held_out)]
    whole = {name: torch.stack([sample[name] for sample in data]) for name in data[0]}
    with torch.no_grad():
        plain = of_all(scores(model.eval()(whole["tokens"]), whole))
    assert alone["samples"] == held_out
    assert {name: alone[name] for name in ("auc", "first")} == {
        "auc": pytest.approx(float(plain["auc"]), rel=1e-12),
        "first": plain["first"],
    }
    for replicate, shard in MESHES:
        ranks = formed(pool, next(pool.generations), Mesh(dp_replicate=replicate, dp_shard=shard), task)
        assert pool.run(run, 4, ranks=ranks) == [alone] * len(ranks)
        pool.run(leave, ranks=ranks)


def test_what_to_keep_and_what_to_make_of_it_belong_together() -> None:
    with pytest.raises(ConfigError, match="one is given without the other"):
        Evaluation(dataset=[1], keep=scores)

    class Odd(Task):
        def evaluation(self) -> Evaluation:
            return Evaluation(dataset=TinyData(4), keep=lambda *_: 3, summary=of_all)

    with pytest.raises(ConfigError, match=r"task.evaluation.keep: it returned a int"):
        evaluator(Odd(), build(Odd())).run(4)


class Restless(nn.Module):
    """Changes a buffer in every forward and draws random numbers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += torch.rand(())
        return self.inner(tokens)


def test_training_does_not_notice_an_evaluation() -> None:
    task = Task(metric=several)
    model = Restless(build(task))
    model.train()
    model.inner.frozen.eval()
    modes = [module.training for module in model.modules()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    tensors = list(model.buffers())

    def draws() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(()).item()

    seed_all(3)
    expected = draws()
    seed_all(3)
    evaluator(task, model).run(4)
    assert draws() == expected
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    assert all(a is b for a, b in zip(model.buffers(), tensors, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_evaluations_are_due_by_step_and_at_the_end() -> None:
    regular, final = (evaluator(Task(every=every), build(Task())) for every in (4, 0))
    assert [step for step in range(1, 11) if regular.due(step)] == [4, 8, 10]
    assert [step for step in range(1, 11) if final.due(step)] == [10]


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="no samples"):
        evaluator(Task(held_out=0), build(Task()))
