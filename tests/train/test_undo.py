"""undo(step(x)) = x within each optimizer's bound; or a refusal, after which nothing has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elastic_train.errors import UndoRefused
from elastic_train.testing.optimizers import LAMB, Lion
from elastic_train.train.undo.undo_step import refusal, settings_of, undo

pytestmark = pytest.mark.ring2

MAKERS = {
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "Lion": Lion,
    "LAMB": LAMB,
}

BOUNDS = {  # in roundings of the tensor's largest element: of parameters, of states
    "SGD": (16, 256),
    "Adam": (16, 256),
    "AdamW": (16, 256),
    "Adagrad": (64, 256),
    "RMSprop": (64, 512),
    "Lion": (16, 256),
    "LAMB": (32, 256),
}

betas = st.tuples(st.sampled_from([0.5, 0.9]), st.sampled_from([0.9, 0.95, 0.999]))
decays = st.sampled_from([0.0, 0.01, 0.1])
HYPERPARAMETERS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "SGD": st.fixed_dictionaries(
        {"lr": st.sampled_from([1e-3, 0.1]), "weight_decay": decays},
        optional={"momentum": st.sampled_from([0.5, 0.9]), "maximize": st.just(True)},
    ),
    "Adam": st.fixed_dictionaries(
        {"lr": st.sampled_from([1e-4, 1e-2]), "betas": betas, "weight_decay": decays},
        optional={"maximize": st.just(True), "foreach": st.booleans()},
    ),
    "AdamW": st.fixed_dictionaries(
        {"lr": st.sampled_from([1e-4, 1e-2]), "betas": betas, "weight_decay": decays},
        optional={"fused": st.just(True)},
    ),
    "Adagrad": st.fixed_dictionaries(
        {"lr": st.sampled_from([1e-2, 0.1]), "weight_decay": decays},
        optional={"lr_decay": st.just(0.1), "initial_accumulator_value": st.just(0.1)},
    ),
    "RMSprop": st.fixed_dictionaries(
        {"lr": st.sampled_from([1e-3, 1e-2]), "weight_decay": decays, "alpha": st.sampled_from([0.9, 0.99])},
        optional={"momentum": st.just(0.9), "centered": st.just(True)},
    ),
    "Lion": st.fixed_dictionaries(
        {"lr": st.sampled_from([1e-4, 1e-2]), "betas": betas, "weight_decay": decays}
    ),
    "LAMB": st.fixed_dictionaries({"lr": st.sampled_from([1e-3, 1e-2]), "weight_decay": decays}),
}


class Run:
    """A few tensors under an optimizer, stepped by gradients between a half and two in size."""

    def __init__(
        self, name: str, hyper: dict[str, Any], *, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.parameters = {
            fqn: nn.Parameter(torch.randn(shape, generator=self._generator, dtype=dtype))
            for fqn, shape in {"a": (5, 7), "b": (3,), "scalar": (), "empty": (0, 4)}.items()
        }
        self.optimizer: Any = MAKERS[name](list(self.parameters.values()), **hyper)

    def step(self, scale: float = 1.0) -> None:
        for p in self.parameters.values():
            size = 0.5 + 1.5 * torch.rand(p.shape, generator=self._generator, dtype=p.dtype)
            sign = torch.randint(2, p.shape, generator=self._generator) * 2 - 1
            p.grad = size * sign * scale
        self.optimizer.step()

    def state(self) -> dict[tuple[str, str], torch.Tensor]:
        found = {(fqn, "param"): p.detach().clone() for fqn, p in self.parameters.items()}
        for fqn, p in self.parameters.items():
            for state, value in self.optimizer.state[p].items():
                if isinstance(value, torch.Tensor):
                    found[fqn, state] = value.clone()
        return found


def same(a: dict[tuple[str, str], torch.Tensor], b: dict[tuple[str, str], torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def assert_close(name: str, found: dict, expected: dict) -> None:
    for (fqn, state), value in expected.items():
        got = found[fqn, state]
        if state == "step":
            assert got == value
        elif value.numel():
            bound = BOUNDS[name][state != "param"] * torch.finfo(value.dtype).eps
            scale = max(float(value.abs().max()), 1e-3)
            worst = float((got - value).abs().max()) / scale
            assert worst <= bound, f"{fqn} {state}: {worst / torch.finfo(value.dtype).eps:.0f} roundings"


@pytest.mark.parametrize("name", MAKERS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_undo_of_a_step_is_the_state_before_it(name: str, data: st.DataObject) -> None:
    hyper = data.draw(HYPERPARAMETERS[name])
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    run = Run(name, hyper, dtype=dtype, seed=data.draw(st.integers(0, 999)))
    for _ in range(data.draw(st.integers(1, 6))):
        run.step()
    before = run.state()
    run.step()
    after = run.state()
    try:
        undo(run.optimizer, run.parameters)
    except UndoRefused:
        assert same(run.state(), after), "a refusal changes nothing"
        return
    assert_close(name, run.state(), before)


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("SGD", {"lr": 0.1, "weight_decay": 0.01}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
        ("Adam", {"lr": 1e-3, "weight_decay": 0.1}),
        ("AdamW", {"lr": 1e-3, "fused": True}),
        ("Adagrad", {"lr": 0.1, "weight_decay": 0.01}),
        ("RMSprop", {"lr": 1e-3, "momentum": 0.9, "centered": True}),
        ("Lion", {"lr": 1e-3, "weight_decay": 0.1}),
        ("LAMB", {"lr": 1e-2, "weight_decay": 0.1}),
    ],
)
@pytest.mark.parametrize("steps", [2, 3, 10])
def test_ordinary_steps_are_undone_and_never_refused(name: str, hyper: dict[str, Any], steps: int) -> None:
    run = Run(name, hyper)
    for _ in range(steps - 1):
        run.step()
    before = run.state()
    run.step()
    undo(run.optimizer, run.parameters)
    assert_close(name, run.state(), before)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "LAMB"])
def test_the_first_step_goes_back_to_empty_moments_exactly(name: str) -> None:
    run = Run(name, {"lr": 1e-2} | ({"momentum": 0.9} if name == "SGD" else {}))
    parameters = {fqn: p.detach().clone() for fqn, p in run.parameters.items()}
    run.step()
    undo(run.optimizer, run.parameters)
    for fqn, p in run.parameters.items():
        torch.testing.assert_close(p.detach(), parameters[fqn], rtol=1e-5, atol=1e-6)
        for state, value in run.optimizer.state[p].items():
            assert not value.any(), f"{fqn} {state}"
    for p in run.parameters.values():
        p.grad = torch.zeros_like(p)
    run.optimizer.step()
    assert all(p.isfinite().all() for p in run.parameters.values())


def test_only_the_named_parameters_go_back() -> None:
    run = Run("AdamW", {"lr": 1e-2})
    run.step()
    before = run.state()
    run.step()
    after = run.state()
    undo(run.optimizer, {"a": run.parameters["a"]})
    now = run.state()
    assert_close(
        "AdamW", {k: v for k, v in now.items() if k[0] == "a"}, {k: before[k] for k in before if k[0] == "a"}
    )
    assert all(torch.equal(now[key], after[key]) for key in now if key[0] != "a")


def test_a_parameter_without_gradient_was_not_touched_and_stays() -> None:
    run = Run("AdamW", {"lr": 1e-2})
    run.step()
    run.parameters["b"].grad = None
    run.optimizer.step()
    after = run.state()
    undo(run.optimizer, run.parameters)
    assert torch.equal(run.state()["b", "param"], after["b", "param"])
    assert run.state()["b", "step"] == 1


def test_the_learning_rate_of_the_step_counts_not_the_one_after_it() -> None:
    run = Run("AdamW", {"lr": 1e-2})
    schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, gamma=0.1)
    run.step()
    schedule.step()
    before, during = run.state(), settings_of(run.optimizer)
    run.step()
    schedule.step()
    undo(run.optimizer, run.parameters, during)
    assert_close("AdamW", run.state(), before)


def test_rows_that_were_never_touched_before_are_empty_again() -> None:
    table = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    optimizer = torch.optim.AdamW([table], lr=1e-2)
    for row in (0, 0, 0, 3):
        table.grad = torch.zeros_like(table)
        table.grad[row] = torch.tensor([1.0, -0.5, 0.25, 3.0])
        optimizer.step()
    undo(optimizer, {"table": table})
    assert not optimizer.state[table]["exp_avg"][3].any()
    assert not optimizer.state[table]["exp_avg_sq"][3].any()
    table.grad = torch.zeros_like(table)
    optimizer.step()
    assert table.isfinite().all()


def refused(run: Run) -> str:
    """Why a step is not undone; nothing has changed."""
    after = run.state()
    with pytest.raises(UndoRefused) as raised:
        undo(run.optimizer, run.parameters)
    assert same(run.state(), after)
    return str(raised.value)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "LAMB", "RMSprop", "Adagrad"])
def test_a_gradient_that_outweighs_all_before_it_is_refused(name: str) -> None:
    run = Run(name, {"lr": 1e-3})
    run.step(1e-2)
    run.step(1e2)
    assert "lost in rounding" in refused(run)


def test_amsgrad_is_refused_by_name() -> None:
    run = Run("AdamW", {"lr": 1e-3, "amsgrad": True})
    run.step()
    assert refusal(run.optimizer) is not None
    assert "AdamW" in (said := refused(run))
    assert "amsgrad" in said


def test_a_decay_that_leaves_little_is_refused() -> None:
    run = Run("AdamW", {"lr": 0.95, "weight_decay": 1.0})
    run.step()
    assert "decay of one step, 0.95" in refused(run)


def test_a_scaled_decay_that_leaves_little_is_refused() -> None:
    run = Run("Adagrad", {"lr": 1.0, "weight_decay": 0.5})
    for p in run.parameters.values():
        p.data.fill_(1.0)
    run.step(1e-3)
    assert "leaves too little" in refused(run)


def test_a_first_step_with_dampening_is_refused() -> None:
    run = Run("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5})
    run.step()
    assert "first step with dampening" in refused(run)


def test_an_average_that_forgets_is_refused() -> None:
    run = Run("AdamW", {"lr": 1e-3, "betas": (0.05, 0.999)})
    run.step()
    run.step()
    assert "keeps only 0.05" in refused(run)


def test_low_precision_is_refused_and_master_weights_are_not() -> None:
    low = Run("AdamW", {"lr": 1e-2}, dtype=torch.bfloat16)
    low.step()
    assert "bfloat16 has too few digits; keep fp32 master weights" in refused(low)
    master = Run("AdamW", {"lr": 1e-2})
    for _ in range(2):
        before = master.state()
        for p in master.parameters.values():
            p.grad = torch.full_like(p, 0.3).bfloat16().float()
        master.optimizer.step()
    undo(master.optimizer, master.parameters)
    assert_close("AdamW", master.state(), before)


def test_another_optimizer_is_refused_by_name() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.NAdam([p])
    p.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(UndoRefused, match="last step of NAdam cannot be undone: no rule is known"):
        undo(optimizer, {"p": p})


def test_another_version_under_a_known_name_is_found_out() -> None:
    made: Any = type("AdamW", (torch.optim.AdamW,), {"step": _shrinking_step})
    p = nn.Parameter(torch.linspace(-1.0, 1.0, 8))
    optimizer = made([p], lr=1e-2)
    for _ in range(3):
        p.grad = torch.linspace(1.0, 2.0, 8)
        optimizer.step()
    with pytest.raises(UndoRefused, match="stepping forward again does not lead back to its param"):
        undo(optimizer, {"p": p})


def _shrinking_step(self: torch.optim.AdamW) -> None:
    torch.optim.AdamW.step(self)
    with torch.no_grad():
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)
