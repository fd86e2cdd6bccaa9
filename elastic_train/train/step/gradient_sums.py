"""Sum a step's gradients over the ranks that share a parameter: replicas, tp positions, pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from elastic_train.train.boundary.crossing import KeptCrossings
from elastic_train.train.boundary.sender import Sender
from elastic_train.train.boundary.tied_gradients import add_kept_ties
from elastic_train.train.collectives.gradient_reduction import (
    agree_on_presence,
    align,
    local_gradient,
    settle_absent,
    squares,
    sum_over_stages,
)
from elastic_train.train.collectives.process_group import Group
from elastic_train.train.parallel.gradient_overlap import GradientSum
from elastic_train.train.parallel.gradient_presence import Presence
from elastic_train.train.parallel.sequence_parallel import sum_over_positions
from elastic_train.train.parallel.tensor_parallel import check_alike
from elastic_train.train.state.live_fragments import replica_of
from elastic_train.train.state.shards import Shards


class GradientSums:
    """Of one generation's shards. `replayed` stands for the other stages: nothing is sent to them then."""

    def __init__(
        self,
        shards: Shards,
        group: Group,
        replayed: KeptCrossings | None,
        *,
        overlaps: bool = True,
        keeps: bool = False,
    ) -> None:
        """Unless it `overlaps`, sums over data are not begun in a backward, and `over_data` is None. Where it
        `keeps`, this rank's own gradients stay beside the sums until they are forgotten.
        """
        assert shards.blueprint is not None
        self._group, self._overlaps, self._keeps = group, overlaps, keeps
        self._shards, self._place, self._replayed = shards, shards.place, replayed
        self.presence = Presence(shards.blueprint)
        self.trainable: dict[str, nn.Parameter] = {}
        self.over_data: GradientSum | None = None
        self.ready: Callable[[Iterable[str]], None] | None = None  # is called with what is summed early
        self._counted: dict[str, bool] = {}  # whether this rank counts a parameter in sums over all ranks
        self._alike = False  # whether all ranks sum all gradients together
        self._checked_alike = False  # by the first step of a generation

    def choose(self, trainable: dict[str, nn.Parameter]) -> None:
        """Sum the gradients of these from now on."""
        self.trainable, place = trainable, self._place
        self._counted = {fqn: replica_of(fqn, p, place).index == 0 for fqn, p in trainable.items()}
        self.over_data = None
        spare, self._shards.spare_memory = self._shards.spare_memory, []
        if place.data is not None and self._overlaps:
            self.over_data = GradientSum(trainable, place.data, self.ready, spare=spare, keeps=self._keeps)
            self._shards.gradient_memory = self.over_data.memory
        replicas = self._shards.plan.mesh.dp_replicate
        self._alike = self.over_data is not None and replicas == self._group.world_size > 1

    def arm(self) -> None:
        """The next backward makes the step's last gradients: sum each bucket as soon as it is complete."""
        if self.over_data is not None:
            self.over_data.arm()

    def came(self) -> Iterable[str]:
        """Parameters whose sums were complete when the step was broken off."""
        return self.over_data.came() if self.over_data is not None else ()

    def own(self) -> dict[str, torch.Tensor]:
        """This rank's own gradients, where they are kept, whatever of them is summed by now."""
        own = {fqn: p.grad for fqn, p in self.trainable.items()}
        if self.over_data is not None:
            own |= self.over_data.own
        return {fqn: gradient for fqn, gradient in own.items() if gradient is not None}

    def forget_own(self) -> None:
        """The step's sums are what counts now."""
        if self.over_data is not None:
            self.over_data.own = {}

    def reduce(self, step: int) -> None:
        """This rank's gradients become the whole step's."""
        self._sum_over_data()
        if not self._checked_alike:
            check_alike(self.trainable, self._place)
            self._checked_alike = True
        self._sum_over_stages(step)

    def squares(self, parameters: Mapping[str, nn.Parameter] | None = None) -> tuple[float, bool]:
        """This rank's part of the sum of squared gradients, and whether all of them are finite."""
        return squares(self.trainable if parameters is None else parameters, self._counted)

    def agreed_presence(self, names: Iterable[str], present: dict[str, bool]) -> dict[str, bool]:
        """Which gradients exist on any rank, from those that exist on this one."""
        names = tuple(names)
        agreed = agree_on_presence(present, names, self._shards.device)
        return dict(zip(names, agreed, strict=True))

    def _sum_over_data(self) -> None:
        """No gradient where no rank has one; elsewhere the sum, to which a rank without one adds zero."""
        shards = self._shards
        present = self.presence.local(self.trainable)
        if self.over_data is not None:
            self.over_data.start_rest()
        if self._alike:
            assert self.over_data is not None
            present = self.over_data.finish()
        elif self._group.world_size > 1:
            present = self.agreed_presence(shards.whole.trainable, present)
            if self.over_data is not None:
                self.over_data.finish()
        settle_absent(self.trainable, present)
        align(self.trainable)
        if shards.regions is not None and self._place.tensor is not None:
            divided = {f: self.trainable[f] for f in self.trainable if f in shards.regions.alone}
            there = {f: local_gradient(p) for f, p in divided.items() if p.grad is not None}
            sum_over_positions(there, self._place.tensor)

    def _sum_over_stages(self, step: int) -> None:
        """Gradients of tensors that are on several stages."""
        sender = Sender(self._shards.log, self._shards.edges, step=step)
        if self._replayed is not None:
            add_kept_ties(self.trainable, self._place, self._replayed, sender)
        else:
            sum_over_stages(self.trainable, self._place, sender.tie)
