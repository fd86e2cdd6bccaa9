"""Whether all ranks that cut parameters call the same parts of the model.

Each part is gathered by all of them when it is called. A forward that chooses parts by its samples, or by
chance, would wait for others that chose other ones. So ranks compare what they call next: in the first
micro-batch of a group always, and from then on where the forward looked at values of tensors, or its code
names a generator of the host. What never looks cannot choose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_train.errors import ConfigError
from elastic_train.train.model.compiled import is_compiled
from elastic_train.train.model.surroundings import Surroundings
from elastic_train.train.model.tensor_names import canonical

_CHOOSES = frozenset({"random", "randint", "choice", "choices", "sample", "shuffle", "tolist", "numpy"})
"""What code names that chooses by other means than by looking at a tensor."""


class UnitCalls:
    """Of one model, or of those of a loop; where nothing is cut it does nothing."""

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        code: Iterable[Any] = (),
    ) -> None:
        """`code` is what calls the model, where that may choose too."""
        self._group, self._device = group, device
        modules: list[tuple[str, Any]] = list(model.named_modules())
        cut = [(path, module) for path, module in modules if issubclass(type(module), FSDPModule)]
        self._units = {canonical(path): module for path, module in cut}
        self._names = list(self._units)
        self._cut = group is not None and bool(self._units)
        self._compiled = is_compiled(model)
        self._chooses = self._cut and bool(_CHOOSES & Surroundings.of([*code, *model.modules()]).read)
        self._known, self._looks, self._within = False, False, False

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """The forward of a micro-batch, or all that a loop does with it, belongs inside."""
        if not self._cut or (self._known and not self._looks):
            yield
            return
        hooks = [
            module.register_forward_pre_hook(partial(self._called, number), prepend=True)
            for number, module in enumerate(self._units.values())
        ]
        looks, self._within = _Looks(), True
        try:
            if self._known or self._compiled:
                yield
            else:
                with looks:
                    yield
            self.end()
            if not self._known:
                self._agree(looks.looked or self._chooses)
        finally:
            self._within = False
            for hook in hooks:
                hook.remove()

    def end(self) -> None:
        """No more forwards before the backward that follows."""
        if self._within:
            self._together(len(self._names))

    # -- private

    def _called(self, number: int, *_: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # what is computed again in backward was compared
            self._together(number)

    def _together(self, number: int) -> None:
        """ConfigError, on all ranks, where they are not at the same."""
        extremes = torch.tensor([number, -number], dtype=torch.float32, device=self._device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group)
        last, first = int(extremes[0]), -int(extremes[1])
        if last == first:
            return
        name = self._names[first] or "the model"
        raise ConfigError(
            field="parallelism.dp_shard",
            problem=f"forward calls {name!r} for some micro-batches and not for others, by their samples or "
            "by chance. Ranks that cut parameters gather each part together.",
            remedy="Keep parameters whole with Parallelism(dp_shard=1), or call all parts for all samples, "
            "and multiply by zero what is not wanted.",
        )

    def _agree(self, looks: bool) -> None:
        flag = torch.tensor([float(looks)], device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        self._known, self._looks = True, bool(flag)


class _Looks(TorchDispatchMode):
    """Notes whether code reads values of tensors, or how many of them are like this."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.data_dependent_output in func.tags or (
            torch.Tag.dynamic_output_shape in func.tags and not _plain_index(func, args)
        ):
            self.looked = True
        return func(*args, **(kwargs or {}))


def _plain_index(func: Any, args: tuple[Any, ...]) -> bool:
    """Rows by number, of which it is known how many there are."""
    if func._schema.name != "aten::index":
        return False
    return not any(tensor is not None and tensor.dtype in (torch.bool, torch.uint8) for tensor in args[1])
