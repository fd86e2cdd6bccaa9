"""Models are built without memory and initialised module by module."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_train.errors import ConfigError
from elastic_train.train.declaration.loop_task import task_of
from elastic_train.train.model.build import allocate, draw, initialise, tensors
from elastic_train.train.model.optimizer import describe
from elastic_train.train.model.seeded_sections import module_init
from elastic_train.train.model.tensor_names import canonical, parameters_of
from elastic_train.train.state.live_fragments import cut_into
from elastic_train.train.task import Task, check_task
from tests.tasks.tiny import TinyTask

pytestmark = pytest.mark.ring2

CPU = torch.device("cpu")


class Given(Task):
    def __init__(self, make: Any) -> None:
        self._make = make

    def model(self) -> nn.Module:
        return self._make()

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named_params], lr=0.1)

    def dataset(self) -> Any:
        return [0]

    def loss(self, output: Any, micro_batch: Any) -> Any:
        return output.sum(), 1


def built(task: Task, precision: Any = "fp32", seed: int = 0) -> nn.Module:
    blueprint = draw(task, precision)
    shapes = {
        fqn: tuple(t.shape)
        for named in (blueprint.parameters, blueprint.buffers)
        for fqn, t in tensors(named).items()
    }
    allocate(blueprint, CPU)
    initialise(
        blueprint,
        task,
        precision=precision,
        device=CPU,
        shapes=shapes,
        seeded=lambda fqn: module_init(seed, fqn, CPU),
        cut=cut_into,
    )
    return blueprint.model


def test_initial_values_depend_on_seed_and_name_only() -> None:
    one, other, third = built(TinyTask()), built(TinyTask()), built(TinyTask(), seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(one.embed.weight, third.embed.weight)
    assert not torch.equal(one.blocks[0].up.weight, one.blocks[1].up.weight)


def test_initialising_draws_nothing_from_the_surrounding_generators() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    built(TinyTask())
    assert torch.equal(torch.rand(2), expected)


class Operations(TorchDispatchMode):
    """Notes the operations that are run within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Filled(nn.Module):
    """Fills its tensors in each of the ways in which modules do, and one that has memory from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Embedding(4, 4), nn.Bilinear(2, 2, 2)])
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.register_buffer("known", torch.arange(3.0, device="cpu"))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        assert nn.init.trunc_normal_(self.weight) is self.weight
        assert nn.init.constant_(tensor=self.weight, val=2.0) is self.weight
        nn.init.orthogonal_(self.weight)
        self.weight.data.exponential_()


def test_nothing_is_drawn_for_tensors_without_memory() -> None:
    with Operations() as operations:
        blueprint = draw(Given(Filled), "fp32")
    fills = ("normal_", "uniform_", "exponential_", "fill_")
    assert not [name for name in operations.names if name.endswith(fills)]
    assert torch.equal(blueprint.constants["known"], torch.arange(3.0))
    assert bool((built(Given(Filled)).weight > 0).all())


def test_ties_stay_ties_and_are_named_once() -> None:
    model = built(TinyTask())
    assert model.head.weight is model.embed.weight
    named = parameters_of(model)
    assert "head.weight" not in named.slots
    assert named.aliases == {"head.weight": "embed.weight"}


def test_a_triple_tie_stays_one_tensor() -> None:
    def make() -> nn.Module:
        model = nn.ModuleDict({name: nn.Linear(3, 3) for name in "abc"})
        model["b"].weight = model["c"].weight = model["a"].weight
        return model

    model: Any = built(Given(make))
    assert model["a"].weight is model["b"].weight is model["c"].weight


def test_a_computed_buffer_is_what_its_module_computes_in_its_dtype() -> None:
    for precision, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
        table = built(TinyTask(), precision).positions.table
        assert table.dtype is dtype
        assert table[1, 0] == torch.sin(torch.ones((), dtype=dtype))


def test_recurrent_layers_use_the_parameters_they_were_given() -> None:
    model = built(Given(lambda: nn.LSTM(4, 5, num_layers=2)))
    output, _ = model(torch.ones(3, 1, 4))
    output.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_values_that_the_model_code_sets_from_numpy_are_kept() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.from_numpy(__import__("numpy").full((2, 2), 7.0, "float32")))

    assert torch.equal(built(Given(Fixed)).weight, torch.full((2, 2), 7.0))


class Uninitialised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.empty(3))


class Forgetful(Uninitialised):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale[:2] = 1.0


def test_a_module_without_initialisation_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"'the root' \(Uninitialised\) owns tensors and has no reset_param"
    ):
        built(Given(Uninitialised))
    with pytest.raises(ConfigError, match=r"module 'block' \(Uninitialised\)"):
        built(Given(lambda: nn.ModuleDict({"block": Uninitialised()})))


def test_a_tensor_that_its_initialisation_leaves_out_is_named() -> None:
    with pytest.raises(ConfigError, match="'scale' of Forgetful has no value"):
        built(Given(Forgetful))


def test_wrappers_leave_no_trace_in_names() -> None:
    plain = {fqn for fqn, _ in nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2))}).named_parameters()}
    wrapped = nn.ModuleDict(
        {"a": nn.Sequential(checkpoint_wrapper(torch.compile(nn.Linear(2, 2), backend="eager")))}
    )
    assert set(parameters_of(wrapped).slots) == plain
    around = checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2)))
    assert set(parameters_of(around).slots) == {"0.weight", "0.bias"}
    assert canonical("module._orig_mod.a._checkpoint_wrapped_module._orig_mod.weight") == "a.weight"


def test_names_that_collide_without_their_wrappers_are_refused() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(1))
    model.module = nn.Module()
    model.module.weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match=r"'weight' and 'module.weight' are both 'weight'"):
        parameters_of(model)


class Misspelt(TinyTask):
    def schedul(self, optimizer: Any) -> None:
        return None


def test_a_task_is_checked_when_it_is_given() -> None:
    check_task(TinyTask())
    with pytest.raises(ConfigError, match=r"task.schedul: .* Did you mean schedule\(\)\?"):
        # TinyTask defines schedule, so only a task without one is suspicious.
        check_task(type("Job", (Given,), {"schedul": Misspelt.schedul})(nullcontext))
    with pytest.raises(ConfigError, match=r"task.loss: Lacking does not define it"):
        check_task(
            type("Lacking", (Task,), {n: getattr(Given, n) for n in ("model", "optimizer", "dataset")})()
        )


class MadeOnTheHost(nn.Module):
    """Parameters that the meta device does not reach: of the oldest constructor, and of a named device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Parameter(torch.Tensor([[1.0, 2.0]])), nn.Linear(2, 2)
        self.tied = nn.Linear(2, 2, device="cpu", bias=False)
        self.tied.weight = self.other.weight


class NeedsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = self.linear.weight.abs().max().item()


@pytest.mark.parametrize("model", [MadeOnTheHost, NeedsValues])
def test_an_optimizer_of_a_loop_holds_parameters_that_were_built_with_memory(model: type[nn.Module]) -> None:
    def loop(ctx: Any) -> None:
        ctx.optimizer("sgd", torch.optim.SGD, ctx.model("m", model), lr=0.1)
        for _ in ctx.batches([0]):
            pass

    task = task_of(loop)
    parameters: Any = tensors(draw(task, "fp32").parameters)
    _, groups = describe(task, parameters)
    assert groups == (tuple(f"m.{name}" for name, _ in model().named_parameters()),)
    assert all(parameter.is_meta for parameter in parameters.values())


class CallsBack(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


def test_an_optimizer_that_calls_back_for_the_loss_is_refused_by_name_where_a_loop_declares_it() -> None:
    def loop(ctx: Any) -> None:
        ctx.optimizer("opt", CallsBack, ctx.model("m", MadeOnTheHost))
        for _ in ctx.batches([0]):
            pass

    with pytest.raises(
        ConfigError, match=r"(?s)ctx.optimizer\('opt'\).*CallsBack computes the loss several times"
    ):
        draw(task_of(loop), "fp32")
