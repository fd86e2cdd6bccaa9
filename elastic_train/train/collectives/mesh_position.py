"""A rank's position in the mesh, and the process groups it shares along each axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from elastic_train.axes import BATCH
from elastic_train.planner.plan import Mesh

SUMMED = (*BATCH, "cp")
"""Axes over which the gradients of parameters are summed, in rank order."""

Stages = Mapping[str, tuple[int, ...]]
"""Pipeline indices on which a tensor is, by fqn; tied tensors may be on several. Absent: on all of them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeshPosition:
    """One rank of a mesh. `data` are the ranks that run other micro-batches, or other positions of the same,
    through the same shards, `context` those with other positions alone, `pipe` those of the same
    micro-batches' other stages, `back` the same for what goes back to earlier ones, `tensor` those that cut
    tensors with this one; None where there are no others. `devices` is torch's mesh of all ranks; None for
    one rank alone."""

    mesh: Mesh
    rank: int
    devices: DeviceMesh | None = None
    data: dist.ProcessGroup | None = None
    context: dist.ProcessGroup | None = None
    pipe: dist.ProcessGroup | None = None
    back: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    stages: Stages = field(default_factory=lambda: MappingProxyType({}))

    @property
    def stage(self) -> int:
        return self.mesh.coordinate(self.rank)["pp"]

    @property
    def first(self) -> bool:
        """Whether the model's inputs enter here."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether the model's output comes out here."""
        return self.stage == self.mesh.pp - 1

    @property
    def counts(self) -> bool:
        """Whether this rank's loss, and what it is a sum over, enter sums over all ranks: other ranks of tp
        have the same numbers."""
        return self.last and self.mesh.coordinate(self.rank)["tp"] == 0

    @property
    def speaks(self) -> bool:
        """Whether this rank tells what is of a whole micro-batch: other ranks of tp and cp know the same."""
        return self.counts and self.mesh.coordinate(self.rank)["cp"] == 0

    @property
    def leads_a_stage(self) -> bool:
        """Whether this is the first rank of one of several stages."""
        return self.mesh.pp > 1 and self.rank % (self.mesh.size // self.mesh.pp) == 0

    def stages_of(self, fqn: str) -> tuple[int, ...]:
        return self.stages.get(fqn, tuple(range(self.mesh.pp)))


def place_on(mesh: DeviceMesh | None, plan_mesh: Mesh, rank: int, stages: Stages) -> MeshPosition:
    """A rank's place. All ranks of the mesh must call it together: it may form a group."""
    data = context = pipe = back = tensor = None
    summed = tuple(axis for axis in SUMMED if getattr(plan_mesh, axis) > 1)
    if mesh is not None and summed:
        if plan_mesh.dp * plan_mesh.cp == plan_mesh.size:
            data = dist.group.WORLD
        elif len(summed) == 1:
            data = mesh[summed[0]].get_group()
        else:
            data = mesh[summed]._flatten("data").get_group()
    if mesh is not None and plan_mesh.cp > 1:
        context = mesh["cp"].get_group()
    if mesh is not None and "pp" in (mesh.mesh_dim_names or ()):
        pipe = back = mesh["pp"].get_group()
        if mesh.device_type != "cpu":
            back = _pipes_again(mesh)
    if mesh is not None and plan_mesh.tp > 1:
        tensor = mesh["tp"].get_group()
    return MeshPosition(
        mesh=plan_mesh,
        rank=rank,
        devices=mesh,
        data=data,
        context=context,
        pipe=pipe,
        back=back,
        tensor=tensor,
        stages=stages,
    )


def _pipes_again(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Another group of the stages of each pipeline. All ranks call it together.

    A device's communicator runs what two ranks send each other in one order, whatever the direction and the
    tag, and a send may wait for its receive. One that runs a micro-batch ahead would send forward where its
    neighbour sends back first: each waits for the other.
    """
    names = mesh.mesh_dim_names or ()
    pipes = mesh.mesh.movedim(names.index("pp"), -1).reshape(-1, mesh["pp"].size()).tolist()
    own, _ = dist.new_subgroups_by_enumeration(pipes)
    assert isinstance(own, dist.ProcessGroup)
    return own
