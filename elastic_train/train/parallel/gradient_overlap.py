"""Sums of gradients over the data-parallel ranks, begun while the last backward of a step still runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from elastic_train.errors import ConfigError, GroupBroken
from elastic_train.train.collectives.gradient_reduction import aligned, is_sharded
from elastic_train.train.model.accumulated_gradients import when_accumulated
from elastic_train.train.parallel.gradient_presence import refuse_sparse

BUCKET_BYTES = 32 << 20


@dataclass(slots=True, kw_only=True, eq=False)
class GradientBucket:
    """Parameters whose gradients are summed together, as parts of the first `size` elements of `flat`."""

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    flat: torch.Tensor
    size: int
    missing: set[int]  # positions whose gradient the last backward has not made yet
    work: dist.Work | None = None
    begun: bool = False


class GradientSum:
    """Sums over the ranks of `group` those gradients that FSDP2 does not, in buckets of a fixed order.

    A bucket starts once its own gradients and those of all buckets before it are there, so every rank starts
    them in one order whatever its backward does. Afterwards gradients are views of the buckets, which hold
    them until the next step. A parameter without a gradient counts as zero; which ones have one on some rank
    is summed along with the last bucket. `summed` hears the names of each bucket whose sum came and of which
    this rank's backward made all gradients.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        summed: Callable[[tuple[str, ...]], None] | None = None,
        *,
        early: bool = True,
        spare: Sequence[torch.Tensor] = (),
        keeps: bool = False,
    ) -> None:
        """Not `early`: nothing is begun before `start_rest`, and parameters may be frozen by then. `spare` is
        memory that is used for buckets of its size. With `keeps` what parameters had before they got a sum is
        in `own`, and a group that breaks lets a backward come to its end.
        """
        self._keeps = keeps
        self._failed: Exception | None = None  # in the last backward, and not raised yet
        self.own: dict[str, torch.Tensor | None] = {}
        self._group, self._summed = group, summed
        whole = {fqn: p for fqn, p in parameters.items() if not is_sharded(p)}
        self._buckets = list(_buckets(whole, list(spare)))
        self._names = tuple(fqn for bucket in self._buckets for fqn in bucket.names)
        # The first bucket that was not begun, that was not taken, and of which nobody heard.
        self._next = self._done = self._told = 0
        self._armed = False
        for number, bucket in enumerate(self._buckets if early else ()):
            for at, parameter in enumerate(bucket.parameters):
                when_accumulated(parameter, self._arrived, number, at)

    @property
    def memory(self) -> list[torch.Tensor]:
        """Of the buckets: another sum may have it as `spare`, once nobody needs these gradients."""
        return [bucket.flat for bucket in self._buckets]

    def arm(self) -> None:
        """The next backward is this rank's last of the step."""
        self._next = self._done = self._told = 0
        self._armed, self._failed, self.own = True, None, {}
        for bucket in self._buckets:
            bucket.work, bucket.begun = None, False
            bucket.missing = set(range(len(bucket.parameters)))

    def start_rest(self) -> None:
        """No more gradients come: start what waits for some."""
        if self._failed is not None:
            raise self._failed
        if not self._armed:
            self.arm()  # a rank without work
        self._armed = False
        while self._next < len(self._buckets):
            self._start_next()

    def finish(self) -> dict[str, bool]:
        """Wait for the sums, and make them the parameters' gradients; which have one on any rank."""
        while self._done < len(self._buckets):
            self._tell(self._take())
        if not self._names:
            return {}
        flags = self._buckets[-1].flat[-len(self._names) :]
        return dict(zip(self._names, (flags > 0).tolist(), strict=True))

    def came(self) -> tuple[str, ...]:
        """After a failure: whose sums came nevertheless, of gradients that this rank had a part in.

        They are made the parameters' gradients. Of a device it is not known once the group is broken: its
        operations end without an error then. What was heard of before came.
        """
        self._armed = False
        if any(bucket.flat.device.type != "cpu" for bucket in self._buckets):
            came = self._told
        else:
            try:
                while self._done < self._next and self._there():
                    self._take()
            except RuntimeError:  # gloo's own: this sum failed, and so do those after it
                pass
            came = self._done
        return tuple(name for b in self._buckets[:came] if not b.missing for name in b.names)

    def _arrived(self, number: int, at: int) -> None:
        """The backward made the gradient at a place of a bucket."""
        if not self._armed:
            return
        bucket = self._buckets[number]
        if bucket.begun:
            raise ConfigError(
                field="task.model",
                problem=f"the gradient of {bucket.names[at]!r} grew after the backward had completed it.",
                remedy="Use torch.utils.checkpoint with use_reentrant=False.",
            )
        bucket.missing.discard(at)
        try:
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                self._start_next()
        except (RuntimeError, GroupBroken) as error:  # in the midst of a backward
            if not self._keeps:
                raise
            self._armed, self._failed = False, error
        if self._summed is not None:
            while self._done < self._next and self._there():
                self._tell(self._take())

    def _there(self) -> bool:
        work = self._buckets[self._done].work
        return work is not None and work.is_completed()

    def _tell(self, bucket: GradientBucket) -> None:
        if self._summed is not None and not bucket.missing:
            self._summed(bucket.names)
        self._told += 1

    def _take(self) -> GradientBucket:
        """Wait for the next bucket's sum, and make it the gradients of its parameters."""
        bucket = self._buckets[self._done]
        assert bucket.work is not None
        bucket.work.wait()
        bucket.work = None
        self._done += 1
        parts = bucket.flat[: bucket.size].split([_local(p).numel() for p in bucket.parameters])
        if self._keeps:
            self.own |= {fqn: p.grad for fqn, p in zip(bucket.names, bucket.parameters, strict=True)}
        for parameter, part in zip(bucket.parameters, parts, strict=True):
            _set_gradient(parameter, part)
        return bucket

    def _start_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.begun = True
        named = zip(bucket.names, bucket.parameters, strict=True)
        torch.cat([_flat_gradient(fqn, p) for fqn, p in named], out=bucket.flat[: bucket.size])
        if bucket is self._buckets[-1]:  # what has no gradient by now gets none in this step
            there = [p.grad is not None for b in self._buckets for p in b.parameters]
            bucket.flat[bucket.size :].copy_(torch.tensor(there))
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)


def _buckets(parameters: Mapping[str, nn.Parameter], spare: list[torch.Tensor]) -> Iterator[GradientBucket]:
    """Runs of one dtype of at most BUCKET_BYTES, or a single larger tensor; last parameters first, as their
    gradients tend to come first. Memory that is `spare` and of the right size is used first."""
    names: list[str] = []
    size = 0
    for fqn, parameter in reversed(list(parameters.items())):
        own = _local(parameter).nbytes
        if names and (parameter.dtype != parameters[names[0]].dtype or size + own > BUCKET_BYTES):
            yield _bucket(names, parameters, spare)
            names, size = [], 0
        names.append(fqn)
        size += own
    if names:
        yield _bucket(names, parameters, spare, room=len(parameters))


def _bucket(
    names: list[str], parameters: Mapping[str, nn.Parameter], spare: list[torch.Tensor], *, room: int = 0
) -> GradientBucket:
    """With `room` for so many elements more."""
    members = tuple(parameters[fqn] for fqn in names)
    local = [_local(p) for p in members]
    size = sum(t.numel() for t in local)
    wanted = (size + room, local[0].dtype, local[0].device)
    there = next((i for i, t in enumerate(spare) if (t.numel(), t.dtype, t.device) == wanted), None)
    return GradientBucket(
        names=tuple(names),
        parameters=members,
        flat=torch.empty(wanted[0], dtype=wanted[1], device=wanted[2]) if there is None else spare.pop(there),
        size=size,
        missing=set(),
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flat_gradient(fqn: str, parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros_like(_local(parameter.detach())).reshape(-1)
    refuse_sparse(fqn, parameter.grad)
    return _local(aligned(parameter, parameter.grad)).reshape(-1)


def _set_gradient(parameter: nn.Parameter, summed: torch.Tensor) -> None:
    local = summed.view(_local(parameter).shape)
    if isinstance(parameter, DTensor):
        parameter.grad = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    else:
        parameter.grad = local
