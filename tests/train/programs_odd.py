"""Programs of unusual shapes: state where nobody looks for it, and code that a plain loop does not mind."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

from tests.train.programs import Fit, Net, Points

Schedules = torch.optim.lr_scheduler


def _of(model: Any, name: str) -> type[Fit]:
    """A task of this model."""

    class Given(Fit):
        def model(self) -> nn.Module:
            return model()

    Given.__name__ = Given.__qualname__ = name
    return Given


def _scheduled(schedule: Any, name: str) -> type[Fit]:
    class Given(Fit):
        def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
            return schedule(optimizer)

    Given.__name__ = Given.__qualname__ = name
    return Given


# -- state of a task and of what surrounds a model ---------------------------------------------------------


class weighs_by_past_losses(Fit):
    """Keeps a moving mean of its losses."""

    def __init__(self) -> None:
        self.mean = 1.0

    def loss(self, output: Any, micro_batch: Any) -> Any:
        total, count = super().loss(output, micro_batch)
        self.mean = 0.9 * self.mean + 0.1 * float(total.detach())
        return total / (1 + self.mean), count


class counts_calls(Fit):
    def __init__(self) -> None:
        self.calls = 0

    def loss(self, output: Any, micro_batch: Any) -> Any:
        self.calls += 1
        total, count = super().loss(output, micro_batch)
        return total * (1 + 0.1 * self.calls), count


_seen = [0]


class counts_in_a_global(Fit):
    def loss(self, output: Any, micro_batch: Any) -> Any:
        _seen[0] += 1
        total, count = super().loss(output, micro_batch)
        return total * (1 + 0.1 * _seen[0]), count


class counts_inputs(Fit):
    def __init__(self) -> None:
        self.calls = 0

    def inputs(self, micro_batch: Any) -> Any:
        self.calls += 1
        return micro_batch["x"] * (1 + 0.1 * self.calls)


class keeps_its_last_loss(Fit):
    """For a person to look at: nothing reads it."""

    def __init__(self) -> None:
        self.last: Any = None
        self.names: list[str] | None = None

    def loss(self, output: Any, micro_batch: Any) -> Any:
        if self.names is None:
            self.names = ["x", "y"]
        total, count = super().loss(output, micro_batch)
        self.last = total.detach()
        return total, count


class penalises_its_model(Fit):
    """Keeps the model that it made, as modules of other frameworks do, and reads it in its loss."""

    def model(self) -> nn.Module:
        self.net = Net()
        return self.net

    def loss(self, output: Any, micro_batch: Any) -> Any:
        total, count = super().loss(output, micro_batch)
        return total + 0.1 * count * sum(p.square().sum() for p in self.net.parameters()), count


class BackwardState(Net):
    """An attribute that the backward changes and the next forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.a.register_full_backward_hook(self._seen)

    def _seen(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.scale = 0.9 * self.scale + 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / (1 + self.scale)


class Scaled(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        Scaled.calls += 1
        return gradient * (1 + 0.1 * Scaled.calls)


class CountedBackward(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Scaled.apply(self.a(x))[:, :6])


class BufferInBackward(Net):
    """A buffer that a tensor's hook moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(self._moved)
        return self.b(torch.tanh(h + self.mean))

    def _moved(self, gradient: torch.Tensor) -> None:
        self.mean.mul_(0.9).add_(gradient.detach().mean(0), alpha=0.1)


class Teacher(nn.Module):
    """A student and its mean teacher, which the optimizer's hook moves."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Net(), Net()
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.student(x) + 0.3 * self.teacher(x)


class mean_teacher(Fit):
    def model(self) -> nn.Module:
        self.made = Teacher()
        return self.made

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        named = dict(named_params)
        optimizer = torch.optim.AdamW([p for p in named.values() if p.requires_grad], lr=1e-2)

        @torch.no_grad()
        def move(*_: Any) -> None:
            for name, p in named.items():
                if name.startswith("teacher."):
                    p.lerp_(named["student." + name.removeprefix("teacher.")], 0.1)

        optimizer.register_step_post_hook(move)
        return optimizer


class mean_teacher_in_groups(mean_teacher):
    """Reaches both by the optimizer's groups, in the same order."""

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        named = list(named_params)
        optimizer = torch.optim.AdamW([p for name, p in named if name.startswith("student.")], lr=1e-2)
        optimizer.add_param_group({"params": [p for name, p in named if name.startswith("teacher.")]})

        @torch.no_grad()
        def move(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            student, teacher = (group["params"] for group in optimizer.param_groups)
            for mine, its in zip(teacher, student, strict=True):
                mine.lerp_(its, 0.1)

        optimizer.register_step_post_hook(move)
        return optimizer


class Masked(Net):
    """Pruned: a mask beside the parameter, the product put in its place before each forward."""

    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.a, "weight", amount=0.5)


class OldWeightNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it is an old one
            self.a = torch.nn.utils.weight_norm(self.a)


class Orthogonal(Net):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.parametrizations.orthogonal(self.blocks[0][0])


class NewParameter(Net):
    """Puts another parameter in the place of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.b.weight = nn.Parameter(self.b.weight.detach() * 0.99)
        return super().forward(x)


class MadeLazily(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "more"):
            self.more = nn.Linear(6, 6, dtype=x.dtype)
        return super().forward(self.more(x))


class Mixed(Net):
    """Parts of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(6, 6, dtype=torch.float32)
        self.brain = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
        self.register_buffer("index", torch.arange(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.single(x.float()).double() * self.brain.double() + self.index)


class CumulativeNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.BatchNorm1d(6, momentum=None), nn.BatchNorm1d(6, track_running_stats=False)
        self.three = nn.InstanceNorm1d(1, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.two(self.one(x)) + self.three(x[:, None])[:, 0])


class SharedAcross(nn.Module):
    """One parameter in modules of unlike kinds, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(6))
        self.norm = nn.LayerNorm(6, bias=False)
        self.norm.weight = self.scale
        self.blocks[2].weight = self.blocks[0].weight
        self.out = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in [*self.blocks, self.blocks[1]]:
            x = torch.tanh(block(x)) * self.scale
        return self.out(self.norm(x).relu_())


class TogglesItself(Net):
    """Freezes a part in its own forward, from a call on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.a.weight.requires_grad_(int(self.calls) < 6)
        return super().forward(x)


class ModeInForward(Net):
    """Leaves a part in evaluation mode behind a forward."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.blocks.eval()
        return out


backward_state = _of(BackwardState, "backward_state")
counted_backward = _of(CountedBackward, "counted_backward")
buffer_in_backward = _of(BufferInBackward, "buffer_in_backward")
pruned = _of(Masked, "pruned")
old_weight_norm = _of(OldWeightNorm, "old_weight_norm")
orthogonal = _of(Orthogonal, "orthogonal")
new_parameter = _of(NewParameter, "new_parameter")
made_lazily = _of(MadeLazily, "made_lazily")
mixed_dtypes = _of(Mixed, "mixed_dtypes")
cumulative_norm = _of(CumulativeNorm, "cumulative_norm")
shared_across = _of(SharedAcross, "shared_across")
toggles_itself = _of(TogglesItself, "toggles_itself")
mode_in_forward = _of(ModeInForward, "mode_in_forward")


# -- optimizers and schedules ------------------------------------------------------------------------------


class Decays:
    """A factor with state of its own, which torch keeps as the callable's attributes."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1 / (1 + self.calls)


def _counting(optimizer: Any) -> Any:
    calls = [0]

    def factor(step: int) -> float:
        calls[0] += 1
        return 1 / calls[0]

    return Schedules.LambdaLR(optimizer, factor)


class OwnSchedule(Schedules.LRScheduler):
    """Also drives the weight decay, and counts for itself."""

    def __init__(self, optimizer: Any) -> None:
        self.history: dict[str, Any] = {"rates": [1e-2], "peak": 0.0}
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.history["rates"] = [*self.history["rates"][-2:], self.history["rates"][-1] * 0.8]
        for group in self.optimizer.param_groups:
            group["weight_decay"] = sum(self.history["rates"])
        return [self.history["rates"][-1] for _ in self.optimizer.param_groups]


decaying_object = _scheduled(lambda o: Schedules.LambdaLR(o, Decays()), "decaying_object")
decaying_closure = _scheduled(_counting, "decaying_closure")
own_schedule = _scheduled(OwnSchedule, "own_schedule")
chained = _scheduled(
    lambda o: Schedules.ChainedScheduler(
        [Schedules.ConstantLR(o, 0.1, total_iters=3), Schedules.ExponentialLR(o, 0.8)]
    ),
    "chained",
)
multiplicative = _scheduled(
    lambda o: Schedules.MultiplicativeLR(o, lambda e: 0.9 if e % 2 else 0.8), "multiplicative"
)
swa_rate = _scheduled(lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=4), "swa_rate")


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer, which keeps its own state."""

    def __init__(self, inner: torch.optim.Optimizer, every: int = 2) -> None:
        self.inner, self.every, self.count = inner, every, 0
        super().__init__(inner.param_groups, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if "slow" not in self.state[p]:
                    self.state[p]["slow"] = p.detach().clone()
        self.inner.step()
        self.count += 1
        if self.count % self.every == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.state[p]["slow"].lerp_(p, 0.5)
                    p.copy_(slow)


class lookahead(Fit):
    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return Lookahead(torch.optim.AdamW([p for _, p in named_params], lr=1e-2))


class Lamb(torch.optim.Optimizer):
    """Scales each tensor's update by norms of the whole tensor."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.1)
                p.sub_(state["m"] * (group["lr"] * p.norm() / (state["m"].norm() + 1e-8)))


class lamb(Fit):
    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return Lamb([p for _, p in named_params])


class Centred(torch.optim.Optimizer):
    """Takes the mean of the gradient over rows off, and clips by the norm of all gradients."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float(p.grad.norm()) ** 2 for p in own) ** 0.5
        for p in own:
            gradient = p.grad - p.grad.mean(0, keepdim=True) if p.ndim > 1 else p.grad
            p.sub_(gradient, alpha=1e-2 / (1 + norm))


class centred(Fit):
    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return Centred([p for _, p in named_params])


class Second(torch.optim.Optimizer):
    """Works on every second step alone, on the sum of two gradients."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                state = self.state[p]
                state["sum"] = p.grad.clone() if "sum" not in state else state["sum"] + p.grad
                if group["k"] % 2 == 0:
                    p.sub_(state.pop("sum"), alpha=group["lr"])


class every_second_step(Fit):
    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return Second([p for _, p in named_params])


# -- loops -------------------------------------------------------------------------------------------------


def _loss(net: nn.Module, micro: Any) -> torch.Tensor:
    return (net(micro["x"]) - micro["y"]).square().mean()


def two_updates(ctx: Any) -> None:
    """A critic within the step, on its own pass, and the other at its end."""
    net, critic = ctx.model("net", Net), ctx.model("critic", lambda: Net(0.2))
    ctx.optimizer("of_net", torch.optim.AdamW, net, lr=1e-2)
    of_critic = ctx.optimizer("of_critic", torch.optim.AdamW, critic, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward((critic(micro["x"]) - net(micro["x"]).detach()).square().mean())
            step.update(of_critic)
            for micro in batch:
                step.backward(_loss(net, micro) + critic(micro["x"] + net(micro["x"])).square().mean())


def updates_the_same_twice(ctx: Any) -> None:
    net = ctx.model("net", Net)
    optimizer = ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for _ in range(2):
                for micro in batch:
                    step.backward(_loss(net, micro))
                step.update(optimizer)


def several_backwards(ctx: Any) -> None:
    net = ctx.model("net", lambda: Net(0.2))
    ctx.optimizer("opt", torch.optim.AdamW, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                out = net(micro["x"])
                step.backward((out - micro["y"]).square().mean(), retain_graph=True)
                step.backward(out.abs().mean() * 0.3)


def clips_by_hand(ctx: Any) -> None:
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro))
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)


def clips_in_a_hook(ctx: Any) -> None:
    """Edits the gradient where it is that of the global batch."""
    net = ctx.model("net", Net)
    optimizer = ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-1)

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_value_(group["params"], 0.1)

    optimizer.register_step_pre_hook(clip)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro))


def zeroes_by_hand(ctx: Any) -> None:
    """One part is left out of every second step."""
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro))
            if batch.step % 2:
                for p in net.a.parameters():
                    p.grad = None


def backwards_by_hand(ctx: Any) -> None:
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                (_loss(net, micro) * 0.1).backward()
                step.backward(_loss(net, micro))


def drops_out_later(ctx: Any) -> None:
    """Sets attributes of modules at a step, for good."""
    net = ctx.model("net", lambda: Net(0.5))
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        if batch.step == 2:
            for block in net.blocks:
                block[2].p = 0.1
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro))


class MaskedByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.mask)


def masks_later(ctx: Any) -> None:
    """Writes into a buffer at a step."""
    net = ctx.model("net", MaskedByHand)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro))
        if batch.step == 2:
            net.mask[:3] = 0.0


def new_mask_later(ctx: Any) -> None:
    """Assigns a buffer at a step."""
    net = ctx.model("net", MaskedByHand)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        if batch.step == 2:
            net.mask = torch.tensor([0.0, 1, 1, 0, 1, 1], dtype=torch.float64)
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro))


def adds_a_group(ctx: Any) -> None:
    net = ctx.model("net", Net)
    optimizer = ctx.optimizer("opt", torch.optim.SGD, net.a, lr=1e-2)
    for batch in ctx.batches(Points):
        if batch.step == 2:
            optimizer.add_param_group({"params": list(net.b.parameters()), "lr": 1e-3})
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro))


def hooks_later(ctx: Any) -> None:
    """Registers a hook at a step."""
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        if batch.step == 2:
            net.a.register_forward_hook(lambda module, inputs, output: output * 0.5)
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro))


def replaces_a_module(ctx: Any) -> None:
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        if batch.step == 2:
            net.blocks[0][1] = nn.ReLU()
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro))


def counts_in_a_variable(ctx: Any) -> None:
    """Of which a person is told."""
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    mean = 0.0
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro) / (1 + mean))
        mean = 0.9 * mean + 0.1 * step.loss


def draws_between_steps(ctx: Any) -> None:
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        noise = torch.randn(6, dtype=torch.float64)
        with ctx.step() as step:
            for micro in batch:
                step.backward((net(micro["x"] + noise) - micro["y"]).square().mean())


def carries_hidden_state(ctx: Any) -> None:
    """From one micro-batch to the next."""
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        last = torch.zeros(6, dtype=torch.float64)
        with ctx.step() as step:
            for micro in batch:
                step.backward((net(micro["x"] + last) - micro["y"]).square().mean())
                last = micro["x"].mean(0)


def reads_gradients(ctx: Any) -> None:
    """Sets its rate by the gradient that was applied."""
    net = ctx.model("net", Net)
    optimizer = ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro))
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step.grad_norm)
