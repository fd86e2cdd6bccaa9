"""Programs with state in tasks, in globals and around a model, and models that change in forward."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

from tests.train.programs import Fit, Net, of_model


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


backward_state = of_model(BackwardState, "backward_state")
counted_backward = of_model(CountedBackward, "counted_backward")
buffer_in_backward = of_model(BufferInBackward, "buffer_in_backward")
pruned = of_model(Masked, "pruned")
old_weight_norm = of_model(OldWeightNorm, "old_weight_norm")
orthogonal = of_model(Orthogonal, "orthogonal")
new_parameter = of_model(NewParameter, "new_parameter")
made_lazily = of_model(MadeLazily, "made_lazily")
mixed_dtypes = of_model(Mixed, "mixed_dtypes")
cumulative_norm = of_model(CumulativeNorm, "cumulative_norm")
shared_across = of_model(SharedAcross, "shared_across")
toggles_itself = of_model(TogglesItself, "toggles_itself")
mode_in_forward = of_model(ModeInForward, "mode_in_forward")
