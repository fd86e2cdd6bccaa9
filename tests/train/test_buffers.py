"""Running statistics come out the same whoever computed which micro-batch; other changes are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastic_train.errors import ConfigError
from elastic_train.testing.gloo_pool import GlooPool, PerRank
from elastic_train.train.collectives.process_group import Group
from elastic_train.train.step.changing_buffers import ChangingBuffers

pytestmark = pytest.mark.ring2


class Net(nn.Module):
    """Every kind of running statistics, one layer called twice, one frozen."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.usual = nn.BatchNorm1d(3)
        self.average = nn.BatchNorm1d(3, momentum=None)
        self.twice = nn.BatchNorm1d(3, momentum=0.3)
        self.frozen = nn.BatchNorm1d(3)
        self.instance = nn.InstanceNorm1d(3, track_running_stats=True)
        self.plain = nn.BatchNorm1d(3, track_running_stats=False)
        self.frozen.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.average(checkpoint(self.usual, x, use_reentrant=False) if self.recompute else self.usual(x))
        x = self.twice(x) + self.twice(2 * x + 1)
        return self.plain(self.instance(self.frozen(x)))


def batch(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(6, 3, 4, dtype=torch.float64, generator=generator) * (index + 1) + index


def fail(module: nn.Module, inputs: Any, output: Any) -> None:
    raise ZeroDivisionError


def state_of(net: nn.Module) -> dict[str, list[float]]:
    return {name: buffer.flatten().tolist() for name, buffer in net.named_buffers()}


def run_steps(
    net: nn.Module, own: Sequence[int], *, data: Any = None, fillers: Sequence[int] = (), total: int = 5
) -> dict[str, list[float]]:
    """Two steps of `total` micro-batches of which this rank runs `own`; the buffers afterwards."""
    buffers = ChangingBuffers(net, data.size() if data else 1, data)
    for step in range(2):
        for index, filler in [*((i, True) for i in fillers), *((i, False) for i in own)]:
            with buffers.watch(index, filler):
                net(batch(10 * step + index)).square().sum().backward()
        with torch.no_grad():
            for fqn, value in buffers.fold(total).items():
                net.get_buffer(fqn).copy_(value)
    return state_of(net)


def on_ranks(
    state: dict[str, Any], store: tuple[str, int], generation: int, rank: int, shares: list[list[int]]
) -> dict[str, list[float]]:
    host, port = store
    group = Group(
        generation=generation,
        rank=rank,
        world_size=len(shares),
        store_host=host,
        store_port=port,
        address="127.0.0.1",
    )
    group.form()
    rounds = max(map(len, shares))
    fillers = [0] * (rounds - len(shares[rank]))
    try:
        return run_steps(Net().double(), shares[rank], data=dist.group.WORLD, fillers=fillers)
    finally:
        group.destroy()


def test_folded_statistics_are_those_of_training_on_one_process() -> None:
    plain = Net().double()
    for step in range(2):
        for index in range(5):
            plain(batch(10 * step + index))
    folded = run_steps(Net().double(), range(5))
    for name, values in state_of(plain).items():
        assert folded[name] == pytest.approx(values, rel=1e-14), name
    assert folded["twice.num_batches_tracked"] == [20]
    assert folded["frozen.num_batches_tracked"] == [0]


@pytest.mark.parametrize("shares", [[[0, 1, 2, 3, 4]], [[0, 1, 2], [3, 4]], [[4, 0], [1], [2, 3]]])
def test_statistics_are_the_same_to_the_bit_under_every_division_of_micro_batches(
    pool: GlooPool, shares: list[list[int]]
) -> None:
    store, ranks = (pool.store_host, pool.store_port), range(len(shares))
    found = pool.run(on_ranks, store, next(pool.generations), PerRank(ranks), shares, ranks=ranks)
    assert found == [run_steps(Net().double(), range(5))] * len(shares)


def test_recomputed_forwards_count_once() -> None:
    plain = run_steps(Net().double(), range(5))
    assert run_steps(Net(recompute=True).double(), range(5)) == plain


def test_a_micro_batch_that_fails_half_way_leaves_buffers_and_momentum_as_they_were() -> None:
    net = Net().double()
    before, tensors = state_of(net), list(net.buffers())
    buffers = ChangingBuffers(net, 2)
    net.plain.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError), buffers.watch(0, False):
        net(batch(0))
    assert state_of(net) == before
    assert all(a is b for a, b in zip(net.buffers(), tensors, strict=True))
    assert (net.usual.momentum, net.average.momentum) == (0.1, None)


def test_a_micro_batch_that_is_not_finite_spoils_no_other_ones_statistics() -> None:
    net = nn.BatchNorm1d(3).double()
    buffers = ChangingBuffers(net, 1)
    with buffers.watch(0, True):
        net(torch.full((4, 3), torch.inf, dtype=torch.float64))
    with buffers.watch(0, False):
        net(batch(0)[:, :, 0])
    assert all(value.isfinite().all() for value in buffers.fold(1).values())


class Counting(nn.Module):
    """Changes a buffer in forward, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("constant", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "in place":
                self.seen.add_(1)
            case "through data":
                self.seen.data.add_(1)
            case "integer":
                self.steps += 1
            case "replaced":
                self.seen = self.seen + 1
            case "cache in place":
                self.cache.add_(1)
            case "rewritten alike":
                self.constant.copy_(torch.ones(2))
            case "cache computed anew":
                self.cache = torch.arange(2.0)
        return x + self.constant


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("in place", "seen"),
        ("through data", "seen"),
        ("integer", "steps"),
        ("replaced", "seen"),
        ("cache in place", "cache"),
    ],
)
def test_a_buffer_that_forward_changes_is_refused_by_name_on_several_ranks(how: str, name: str) -> None:
    model = nn.Sequential(Counting(how))
    buffers = ChangingBuffers(model, 2)
    with pytest.raises(ConfigError, match=rf"model\.0\.{name}"), buffers.watch(0, False):
        model(torch.ones(2))


@pytest.mark.parametrize("how", ["rewritten alike", "cache computed anew", "nothing"])
def test_what_is_not_state_may_be_written(how: str) -> None:
    model = nn.Sequential(Counting(how))
    buffers = ChangingBuffers(model, 2)
    for index in range(3):
        with buffers.watch(index, False):
            model(torch.ones(2))
    assert buffers.fold(3) == {}


def test_one_rank_may_change_any_buffer() -> None:
    model = Counting("in place")
    with ChangingBuffers(model, 1).watch(0, False):
        model(torch.ones(2))
    assert model.seen.tolist() == [1, 1]


def test_normalisation_over_ranks_is_refused_by_name() -> None:
    model = nn.Sequential(nn.SyncBatchNorm(3))
    with pytest.raises(ConfigError, match=r"0\.running_mean"):
        ChangingBuffers(model, 2)
