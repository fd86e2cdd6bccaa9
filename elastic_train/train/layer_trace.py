"""Trace one micro-batch on fake tensors: operations and bytes of each block, forward and backward.

Nothing is computed: fake tensors (torch's FakeTensorMode) have shapes, dtypes and the kernels that the CPU's
tensors would take, fused attention among them, but no memory.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from elastic_train.config import RunSpec
from elastic_train.data.numbered import tell_epoch
from elastic_train.train.model.build import DTYPE_OF, Blueprint, allocate
from elastic_train.train.model.collate import caller, placed
from elastic_train.train.model.positions import POSITIONS
from elastic_train.train.model.recompute import KEPT
from elastic_train.train.model.weight_casts import cast_again
from elastic_train.train.parallel.parallelize import COMPUTED, compute_in
from elastic_train.train.task import Task, takes_step

CPU, META = torch.device("cpu"), torch.device("meta")
_ATTENTION_OF_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(slots=True)
class LayerTrace:
    """One micro-batch of one layer. Bytes, and floating-point operations of its forward."""

    flops: float = 0.0
    repeated_flops: float = 0.0  # of these, what recompute "selective" computes again
    kept: int = 0  # from the layer's forward to its backward
    selective: int = 0  # likewise under recompute "selective"
    working: int = 0  # beyond what is kept, at the peak of its forward or backward
    touched: int = 0  # read and written by what multiplies no matrices, forward and backward
    touched_again: int = 0  # of these, in forward
    routed: int = 0  # into experts


@dataclass(slots=True, kw_only=True)
class Trace:
    """By block, -1 before the first and `blocks` after the last, where the loss is too."""

    layers: defaultdict[int, LayerTrace] = field(default_factory=lambda: defaultdict(LayerTrace))
    boundary: int = 0  # bytes of the tensor between two blocks
    positions: int = 0  # of that tensor


def trace_layers(
    task: Task, spec: RunSpec, blueprint: Blueprint, blocks: Sequence[nn.Module], experts: Iterable[nn.Module]
) -> Trace | None:
    """A micro-batch through the model and its loss; None where its code needs values of tensors.

    The blueprint's tensors lose their memory. Where backward does not run without values, what layers need
    beyond what they keep stays 0. What fake tensors refuse may run on the meta device, as routing to experts
    does; attention is not fused there.
    """
    for device, mode in ((CPU, FakeTensorMode(allow_non_fake_inputs=True)), (META, nullcontext())):
        found = _traced(task, spec, blueprint, blocks, list(experts), device, mode)
        if found is not None:
            return found
    return None


def _traced(
    task: Task,
    spec: RunSpec,
    blueprint: Blueprint,
    blocks: Sequence[nn.Module],
    experts: Sequence[nn.Module],
    device: torch.device,
    mode: AbstractContextManager[Any],
) -> Trace | None:
    dataset = task.dataset()
    tell_epoch(dataset, 0)
    batch = placed(task.collate([dataset[0]] * spec.batch.micro_size), device, DTYPE_OF[spec.precision])
    lower = spec.precision in COMPUTED
    with mode, ExitStack() as stack:
        allocate(blueprint, device)
        tracer = _Tracer(blueprint.model)
        for number, block in enumerate(blocks):
            stack.callback(block.register_forward_pre_hook(partial(tracer.enter, number)).remove)
            stack.callback(block.register_forward_hook(partial(tracer.leave, number)).remove)
        for module in experts:
            stack.callback(module.register_forward_pre_hook(tracer.route).remove)
        for parameter in blueprint.model.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(_forget).remove)
        last = len(blocks)
        try:
            with tracer.counter, tracer.bytes:
                with compute_in(CPU, spec.precision), cast_again(lower):
                    output = caller(blueprint.model)(task.inputs(batch))
                    tracer.settle(last)
                    loss, *_ = task.loss(output, batch, *((1,) if takes_step(task) else ()))
                del output
                tracer.settle(last)
                _backward(tracer, loss, last)
        except (RuntimeError, NotImplementedError):
            return None
    return tracer.trace


def _backward(tracer: _Tracer, loss: torch.Tensor, last: int) -> None:
    tracer.turn(last)
    try:
        loss.backward()
    except (RuntimeError, NotImplementedError):
        return
    tracer.turn(-1)


def _forget(parameter: torch.Tensor) -> None:
    """Gradients are counted apart: summed whole, or divided as backward goes."""
    parameter.grad = None


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations made and that are still alive, and the peak since the last mark.

    `kept` sums the results of the operations that recompute "selective" keeps, `touched` what operations read
    and write that the counter of floating-point operations does not know.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = self.kept = self.touched = 0
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._outside = {t.untyped_storage() for t in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        for leaf in made:
            self._add(leaf)
        if func in KEPT:
            self.kept += _nbytes(made)
        if made and not func.is_view and func.overloadpacket not in _COMPUTING:
            self.touched += _nbytes(made) + _nbytes(tree_leaves((args, kwargs)))
        return out

    def mark(self) -> int:
        """The peak since the last mark."""
        peak, self.peak = self.peak, self.now
        return peak

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if storage in self._outside or key in self._held:
            return
        size = storage.nbytes()
        self._held[key] = weakref.ref(storage, partial(self._free, key, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _free(self, key: int, size: int, _gone: object) -> None:
        del self._held[key]
        self.now -= size


def _nbytes(values: Iterable[Any]) -> int:
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))


class _Tracer:
    """What is counted goes to the layer that runs now."""

    def __init__(self, model: nn.Module) -> None:
        self.trace = Trace()
        self.counter = FlopCounterMode(display=False, custom_mapping={_ATTENTION_OF_CPU: _attention_flops})
        self.bytes = LiveBytes((*model.parameters(), *model.buffers()))
        self._at, self._entered = -1, 0
        self._flops: dict[Any, float] = {}
        self._kept = self._touched = 0

    def settle(self, at: int) -> None:
        """The forward of the present layer is over, that of `at` begins."""
        layer, live = self.trace.layers[self._at], self.bytes
        counted = {op: float(n) for op, n in self.counter.get_flop_counts().get("Global", {}).items()}
        for operation, total in counted.items():
            flops = total - self._flops.get(operation, 0.0)
            layer.flops += flops
            if operation not in _MATRICES:
                layer.repeated_flops += flops
        layer.working = max(layer.working, live.mark() - live.now)
        layer.kept += live.now - self._entered
        layer.selective += live.kept - self._kept
        layer.touched_again += self._touch(layer)
        self._flops, self._kept, self._entered, self._at = counted, live.kept, live.now, at

    def turn(self, at: int) -> None:
        """The backward of the present layer is over, that of `at` begins."""
        layer = self.trace.layers[self._at]
        layer.working = max(layer.working, self.bytes.mark() - self._entered)
        self._touch(layer)
        self._at, self._entered = at, self.bytes.now

    def _touch(self, layer: LayerTrace) -> int:
        new, self._touched = self.bytes.touched - self._touched, self.bytes.touched
        layer.touched += new
        return new

    def enter(self, number: int, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.settle(number)
        if number == 0 and inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].requires_grad:
            inputs[0].register_hook(self._turner(-1))

    def leave(self, number: int, _module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
        self.settle(number + 1)
        if isinstance(output, torch.Tensor):
            trace = self.trace
            trace.boundary = max(trace.boundary, output.numel() * output.element_size())
            trace.positions = output.shape[POSITIONS] if output.ndim > POSITIONS else 0
            if output.requires_grad:
                output.register_hook(self._turner(number))

    def route(self, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.trace.layers[self._at].routed += inputs[0].numel() * inputs[0].element_size()

    def _turner(self, at: int) -> Callable[[torch.Tensor], None]:
        def hook(_gradient: torch.Tensor) -> None:
            self.turn(at)

        return hook


_COMPUTING = {
    *flop_registry,
    _ATTENTION_OF_CPU,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    torch.ops.aten._unsafe_view,
}
"""Operations that are counted in operations and not in bytes, and a view that does not say so."""
_MATRICES = frozenset(operation.overloadpacket for operation in KEPT)


def _attention_flops(query: torch.Size, _key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    """torch counts the fused attention of other devices alone. Masked positions count, as they do there."""
    batch, heads, positions, width = query
    seen, values = value[-2:]
    return 2 * batch * heads * positions * seen * (width + values)
