"""Random choices follow the seed and logical positions only."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from elastic_train.errors import ConfigError
from elastic_train.planner.plan import Mesh
from elastic_train.testing.gloo_pool import GlooPool, PerRank
from elastic_train.train.collectives.process_group import Group
from elastic_train.train.model.dropout import effective_probability, keep_mask, keyed_dropout
from elastic_train.train.model.rng import Randomness, derive, preserved, seed_all, seed_sample

pytestmark = pytest.mark.ring2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.3, batch_first=True)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x)[0]
        return x + self.drop(self.down(F.dropout(F.gelu(self.up(x)), 0.1, self.training)))


class Net(nn.Module):
    """Blocks, optionally each called twice and optionally recomputed in backward."""

    def __init__(
        self, *, width: int = 8, blocks: int = 3, twice: bool = False, recompute: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(8) for _ in range(blocks)])
        self.twice = twice
        self.recompute = recompute
        self.keep_random_state = True

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + self.twice):
            for layer in self.layers:
                if self.recompute:
                    x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=self.keep_random_state)
                else:
                    x = layer(x)
        return x


def make(*, training: bool = True, **options: Any) -> Net:
    seed_all(0)
    return Net(**options).double().train(training)


def batch() -> Tensor:
    return torch.linspace(-1, 1, 2 * 5 * 8, dtype=torch.float64).view(2, 5, 8)


def gradients(net: Net, *, step: int = 1, index: int = 0, seed: int = 3) -> Tensor:
    """All gradients of one micro-batch, flat."""
    randomness = Randomness(net, seed=seed)
    with randomness.micro_batch(step, index):
        net(batch()).square().sum().backward()
    randomness.remove()
    flat = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    net.zero_grad()
    return flat


def test_samples_are_seeded_by_epoch_and_id_alone() -> None:
    def draws(epoch: int, sample: int) -> tuple[float, float, float]:
        seed_sample(7, epoch, sample)
        return random.random(), np.random.rand(), torch.rand(()).item()

    first = draws(0, 5)
    others = [draws(1, 5), draws(0, 6), draws(5, 0)]
    assert draws(0, 5) == first
    assert all(a != b for other in others for a, b in zip(first, other, strict=True))


def test_derived_numbers_never_change_between_versions() -> None:
    assert derive(0, "sample", 1, 2) == 4519521162910000735
    assert derive(0, "sample", 1, 2) != derive(0, "sample", 12)
    assert derive(0, "block", "1") != derive(0, "block", 1)


def test_masks_follow_seed_step_and_micro_batch_whatever_ran_before() -> None:
    net = make()
    first = gradients(net)
    assert not torch.equal(first, gradients(net, index=1))
    assert not torch.equal(first, gradients(net, step=2))
    assert not torch.equal(first, gradients(net, seed=4))
    torch.rand(100)
    assert torch.equal(first, gradients(net))


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("blocks", [1, 3])
def test_recomputed_activations_use_the_masks_of_the_forward(twice: bool, blocks: int) -> None:
    expected = gradients(make(blocks=blocks, twice=twice))
    assert torch.equal(expected, gradients(make(blocks=blocks, twice=twice, recompute=True)))


def test_a_block_called_twice_and_recomputed_without_its_random_state_is_refused_by_name() -> None:
    net = make(twice=True, recompute=True)
    net.keep_random_state = False
    with pytest.raises(ConfigError, match=r"model\.layers\.\d.*preserve_rng_state"):
        gradients(net)


def test_a_block_called_twice_draws_different_masks() -> None:
    drop = nn.Sequential(nn.Dropout(0.5))
    ones = torch.ones(64)
    with Randomness(drop, seed=1).micro_batch(1, 0):
        assert not torch.equal(drop(ones), drop(ones))


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_pipeline_cut_between_blocks_changes_no_mask(cut: int) -> None:
    net = make(blocks=4)
    with Randomness(net, seed=3).micro_batch(5, 2):
        expected = net(batch())
    x = batch()
    for part in (range(cut), range(cut, 4)):
        whole, stage = make(blocks=4), nn.Module()
        stage.layers = nn.ModuleDict({str(i): whole.layers[i] for i in part})
        with Randomness(stage, seed=3).micro_batch(5, 2):
            for layer in stage.layers.values():
                x = layer(x)
    assert torch.equal(x, expected)


def test_without_a_micro_batch_under_way_dropout_and_generators_are_torchs_own() -> None:
    drop = nn.Sequential(nn.Dropout(0.5))
    torch.manual_seed(0)
    expected = F.dropout(torch.ones(64))
    randomness = Randomness(drop, seed=1)
    with randomness.micro_batch(1, 0):
        drop(torch.ones(64))
    torch.manual_seed(0)
    assert torch.equal(drop(torch.ones(64)), expected)


def test_preserved_generators_continue_as_if_nothing_was_drawn() -> None:
    seed_all(5)
    with preserved():
        first = random.random(), np.random.rand(), torch.rand(()).item()
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == first


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_are_uniform_and_independent_between_elements_and_keys(p: float) -> None:
    """Patterns of 8 neighbours, and of one element under 8 keys, counted against their probabilities."""
    n = 1 << 18
    keys = [derive(1, "test", i) for i in range(4)] + [1000, 1001, 1002, 1003]
    masks = torch.stack([keep_mask(key, (n,), p) for key in keys]).long()
    bits = 2 ** torch.arange(8)
    kept = torch.tensor([bin(pattern).count("1") for pattern in range(256)])
    exact = effective_probability(p)
    expected = (1 - exact) ** kept * exact ** (8 - kept)
    neighbours = (masks.view(8, n // 8, 8) * bits).sum(-1).flatten()
    across = (masks * bits[:, None]).sum(0)
    for patterns in (neighbours, across):
        counts = torch.bincount(patterns, minlength=256).double()
        wanted = expected * patterns.numel()
        likely = wanted >= 5
        statistic = ((counts - wanted) ** 2 / wanted)[likely].sum().item()
        freedom = int(likely.sum()) - 1
        assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


def test_a_block_of_a_tensor_gets_its_part_of_the_mask() -> None:
    whole = keep_mask(99, (7, 5, 6), 0.3)
    part = keep_mask(99, (3, 5, 4), 0.3, whole=(7, 5, 6), offsets=(2, 0, 1))
    assert torch.equal(part, whole[2:5, :, 1:5])


@pytest.mark.parametrize(
    ("module", "shape", "droppable"),
    [
        (nn.Dropout(0.4), (64, 50), (64, 50)),
        (nn.Dropout(0.4, inplace=True), (64, 50), (64, 50)),
        (nn.Dropout1d(0.4), (64, 50, 3), (64, 50, 1)),
        (nn.Dropout1d(0.4), (64, 3), (64, 1)),
        (nn.Dropout2d(0.4), (64, 50, 3, 2), (64, 50, 1, 1)),
        (nn.Dropout3d(0.4), (64, 50, 1, 3, 2), (64, 50, 1, 1, 1)),
    ],
)
def test_every_kind_of_dropout_drops_what_it_should_and_keeps_the_expectation(
    module: nn.Module, shape: tuple[int, ...], droppable: tuple[int, ...]
) -> None:
    torch.manual_seed(1)
    with keyed_dropout():
        out = module(torch.ones(shape))
    scale = 1 / (1 - effective_probability(0.4))
    assert set(out.unique().tolist()) == {0.0, torch.tensor(scale).item()}
    first = out[tuple(slice(0, n) for n in droppable)]
    assert torch.equal(first.expand(shape), out)
    assert first.mean().item() == pytest.approx(1, abs=5 * scale / first.numel() ** 0.5)


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    torch.manual_seed(1)
    x = torch.randn(200_000)
    with keyed_dropout():
        out = F.alpha_dropout(x, 0.3, training=True)
    assert out.mean().item() == pytest.approx(0, abs=0.02)
    assert out.std().item() == pytest.approx(1, abs=0.02)


def test_evaluation_mode_and_extreme_probabilities_behave_as_in_torch() -> None:
    ones = torch.ones(8)
    with keyed_dropout():
        assert torch.equal(F.dropout(ones, 0.5, training=False), ones)
        assert torch.equal(F.dropout(ones, 0.0), ones)
        assert torch.equal(F.dropout(ones, 1.0), torch.zeros(8))


def sharded_dropout(state: dict[str, Any], store: tuple[str, int], generation: int, rank: int) -> list[bool]:
    """Whether dropout of a sharded tensor equals dropout of the whole one, for several placements."""
    group = Group(
        generation=generation,
        rank=rank,
        world_size=3,
        store_host=store[0],
        store_port=store[1],
        address="127.0.0.1",
    )
    group.form()
    mesh = group.mesh(Mesh(dp_shard=3))["dp_shard"]
    equal: list[bool] = []
    for dim in (0, 1, None):
        whole = torch.arange(1.0, 7 * 5 * 4 + 1).view(7, 5, 4)
        placement = Replicate() if dim is None else Shard(dim)
        for drop in (F.dropout, F.dropout1d):
            torch.manual_seed(11)
            with keyed_dropout():
                expected = drop(whole, 0.5)
            torch.manual_seed(11)
            with keyed_dropout():
                out = drop(distribute_tensor(whole, mesh, [placement]), 0.5)
            equal.append(torch.equal(out.full_tensor(), expected))
    group.destroy()
    return equal


def test_shards_of_a_tensor_drop_what_the_whole_would_drop(pool: GlooPool) -> None:
    store = (pool.store_host, pool.store_port)
    equal = pool.run(sharded_dropout, store, next(pool.generations), PerRank([0, 1, 2]), ranks=[0, 1, 2])
    assert equal == [[True] * 6] * 3
