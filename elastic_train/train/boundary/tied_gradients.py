"""Sum gradients of tied parameters in a replay: those of other stages come from the boundary log."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from elastic_train.train.boundary.crossing import Crossing, KeptCrossings
from elastic_train.train.boundary.sender import Sender
from elastic_train.train.collectives.gradient_reduction import local_gradient, summed
from elastic_train.train.collectives.mesh_position import MeshPosition


def add_kept_ties(
    parameters: Mapping[str, nn.Parameter], place: MeshPosition, kept: KeptCrossings, sender: Sender
) -> None:
    """The sum over stages as it was made in the step. Raises KeyError where the log lacks a part."""
    for fqn, parameter in parameters.items():
        stages = place.stages_of(fqn)
        if len(stages) == 1 or parameter.grad is None:
            continue
        mine, edges = local_gradient(parameter), sender.edges
        logged = {stage: edges.stage_of(stage) for stage in stages}
        others = {
            stage: kept.read(
                Crossing(
                    step=sender.step,
                    kind="tie",
                    source=logged[stage],
                    target=edges.first,
                    name=fqn,
                    part=edges.part,
                )
            ).to(mine.device)
            for stage in stages
            if stage != place.stage
        }
        for stage in others:
            sender.tie(fqn, logged[stage], mine)
        mine.copy_(summed(mine.contiguous(), others, stages))
