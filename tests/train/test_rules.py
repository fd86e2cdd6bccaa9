"""What a model must allow to be cut over tp or into stages, and what is said where it doesn't."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from elastic_train.errors import ConfigError
from elastic_train.models.llama import Llama
from elastic_train.models.sizes import LlamaConfig
from elastic_train.planner.plan import Mesh
from elastic_train.train.model.build import Blueprint, draw, tensors
from elastic_train.train.model.rng import Randomness
from elastic_train.train.parallel.parallelize import check_rules
from elastic_train.train.parallel.pipeline_stages import blocks_of, cut_stage
from elastic_train.train.parallel.tensor_parallel import Regions, styles
from elastic_train.train.state.plan_layouts import plan_on
from elastic_train.train.task import Rules
from tests.tasks.chain import ChainTask
from tests.tasks.tiny import TinyTask
from tests.train.equality import spec

pytestmark = pytest.mark.ring2

CHAIN = Llama.rules()


def grouped(kv_heads: int) -> nn.Module:
    with torch.device("meta"):
        return Llama(LlamaConfig(dim=16, layers=2, heads=4, kv_heads=kv_heads, hidden=42, vocabulary=101))


def test_more_ranks_than_key_and_value_heads_are_refused_with_the_legal_numbers() -> None:
    with pytest.raises(ConfigError, match=r"4 ranks .* 2 key and value heads.* Legal are 1, 2\."):
        styles(grouped(2), CHAIN, 4)
    assert styles(grouped(2), CHAIN, 2)["layers.1.attention.wk"] == "column"


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        (Rules(), "nothing says how Llama may be cut"),
        (Rules(tensor_parallel={"layers.*.q": "column"}), "no module matches"),
        (Rules(tensor_parallel={"norm": "column"}), "'norm' is a RMSNorm"),
        (Rules(tensor_parallel={"head": "sideways"}), "none of column"),  # type: ignore[dict-item]
    ],
)
def test_rules_that_do_not_fit_the_model_are_named(rules: Rules, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        styles(grouped(4), rules, 2)


def test_styles_may_be_torchs_own() -> None:
    given = {
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
        "loss": ColwiseParallel(use_local_output=False),
        "embed": "row",
    }
    rules = Rules(tensor_parallel=given)
    assert list(rules.tensor_parallel.values()) == ["column", "row", "column_gathered", "column_loss", "row"]
    assert rules == replace(rules)
    for style in (RowwiseParallel(output_layouts=Shard(1)), SequenceParallel()):
        with pytest.raises(ConfigError, match=r"of 'norm' leaves activations .* Rules\(sequence="):
            Rules(tensor_parallel={"norm": style})


@pytest.mark.parametrize("tied", [True, False])
def test_stages_hold_every_tensor_between_them_and_a_tied_one_twice(tied: bool) -> None:
    task, ranges = ChainTask(tied=tied), ((0, 1), (1, 4), (4, 4))
    whole = draw(task, "fp32")
    names = set(tensors(whole.parameters))
    found = [cut_stage(draw(task, "fp32"), CHAIN, ranges, stage) for stage in range(3)]
    held = [set(tensors(blueprint.parameters)) for blueprint, _ in found]
    assert set().union(*held) == names
    twice = {name for name in names if sum(name in each for each in held) > 1}
    assert twice == ({"embed.weight"} if tied else set())
    assert found[0][1]["embed.weight"] == ((0, 2) if tied else (0,))
    assert "layers.1.attention.wq.weight" in held[1]
    assert held[2] == ({"norm.weight", "embed.weight"} if tied else {"norm.weight", "head.weight"})


def cut(model: nn.Module, rules: Rules, blocks: int) -> Blueprint:
    task = Given(model)
    return cut_stage(draw(task, "fp32"), rules, ((0, 1), (1, blocks)), 0)[0]


@dataclass
class Given(TinyTask):
    net: nn.Module = field(default_factory=nn.Module)

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def model(self) -> nn.Module:
        return self.net


class Prefixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.zeros(2))
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        activation = nn.PReLU()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), activation) for _ in range(2))


@pytest.mark.parametrize(
    ("model", "rules", "problem"),
    [
        (Prefixed(), Rules(stages=("blocks.*",)), "owns parameters itself"),
        (Shared(), Rules(stages=("blocks.*",)), "the same PReLU is used in two stages"),
        (Shared(), Rules(), "nothing says that Shared is a chain"),
        (Shared(), Rules(stages=("layers.*",)), "no ModuleList or Sequential has members"),
    ],
)
def test_a_model_that_is_no_chain_is_not_cut_into_stages(
    model: nn.Module, rules: Rules, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        cut(model, rules, 2)


def test_a_sequential_model_needs_no_rules() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    assert blocks_of(model, Rules()).chained
    first = cut(model, Rules(), 3)
    assert set(tensors(first.parameters)) == {"0.weight", "0.bias"}


class Cut(nn.Module):
    """A dropout between two projections, in a Sequential, whose elements are seeded one by one."""

    def __init__(self, p: float, regions: Regions) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(2, 4), nn.Dropout(p), nn.Linear(4, 2))
        self.parts[0].register_forward_hook(lambda *_: regions.open("up"))
        self.parts[2].register_forward_pre_hook(lambda *_: regions.close("down"))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_mask_on_a_cut_activation_is_refused(p: float) -> None:
    regions = Regions(torch.device("cpu"))
    model = Cut(p, regions)
    randomness = Randomness(model, seed=3, around=regions.around)
    with randomness.micro_batch(1, 0):
        if p:
            with pytest.raises(ConfigError, match="drawn between 'up' and"):
                model(torch.ones(1, 2))
        else:
            model(torch.ones(1, 2))


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_what_is_compiled_is_not_cut(axis: str) -> None:
    class Compiled(ChainTask):
        def model(self) -> nn.Module:
            model = super().model()
            model.compile(backend="eager")
            return model

    plan = plan_on(ChainTask(), spec(), Mesh(**{axis: 2}))
    with pytest.raises(ConfigError, match=rf"parallelism.{axis}: the model, or a part of it, is compiled"):
        check_rules(Compiled(), spec(), plan)
