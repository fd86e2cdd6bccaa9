"""Initial values: those of the model that the job's own code makes in one process from the seed.

Each process builds it for real, on the host, cuts its shards from it and drops it. A job that defines
`Task.init` gives values itself, module by module, and so does a model of which a node has no room for the
copies that its ranks would build: torch's `reset_parameters` then draws other numbers than a plain build.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastic_train.checkpoint.engine.machine_memory import memory_room
from elastic_train.config import RunSpec
from elastic_train.errors import ConfigError
from elastic_train.planner.plan import bytes_text
from elastic_train.train.declaration.declare import declared
from elastic_train.train.declaration.loop_task import LoopTask
from elastic_train.train.model import seeded_sections
from elastic_train.train.model.build import in_rank_order, initialise, tensors
from elastic_train.train.model.new_modules import check_new
from elastic_train.train.model.plain_build import DTYPE_OF, plainly
from elastic_train.train.model.tensor_names import buffers_of, canonical, parameters_of
from elastic_train.train.model.unwritten import is_unwritten
from elastic_train.train.state.live_fragments import cut_into, numpy_bits
from elastic_train.train.state.shards import Shards
from elastic_train.train.task import Task

MOST_OF_A_NODE = 0.5
"""Share of a node's memory that the models which its ranks build for their first values may take."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Values:
    """The whole tensors of a model by fqn, and the further names of ties."""

    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    generators: dict[str, Any]  # of a loop


def give_values(task: Task, spec: RunSpec, shards: Shards) -> tuple[str, ...]:
    """Fill the shards. All ranks call it; sentences about what a person should know."""
    loop = isinstance(task, LoopTask)
    if not loop and type(task).init is not Task.init:
        _by_module(task, spec, shards)
        return ()
    room, copies = memory_room(), _ranks_here(shards)
    notes: tuple[str, ...] = ()
    if shards.by_module is None:  # else it was chosen before, maybe on other machines: values stay the same
        shards.by_module = not agreed(shards, shards.whole.nbytes * copies <= MOST_OF_A_NODE * room)
        notes = (
            f"initial values: {copies} copies of a model of {bytes_text(shards.whole.nbytes)} take too much "
            f"of a node's memory ({bytes_text(room)}), so each module was initialised alone, by its "
            "reset_parameters(); model() in one process draws other values. Define Task.init to choose them",
        )
    if shards.by_module:
        _by_module(task, spec, shards)
        return notes
    values = built_values(task, spec)
    if shards.place.devices is not None:
        _compare(values, shards)
    _cut(values, shards)
    if isinstance(task, LoopTask):
        assert shards.registered is not None
        shards.registered.generators = values.generators
    if isinstance(task, LoopTask) and (own := task.with_init):
        _by_module(task, spec, shards, own)
    return ()


def built_values(task: Task, spec: RunSpec) -> Values:
    """The model built for real. A tensor that its code left empty is its module's to reset."""
    # A copy: a task that keeps its model keeps the one that is trained.
    build = task.models if isinstance(task, LoopTask) else copy.copy(task).model
    model = plainly(build, DTYPE_OF[spec.precision], spec.batch.seed)
    check_new(model)
    own = task.with_init if isinstance(task, LoopTask) else frozenset[str]()
    for path, module in model.named_modules():
        fqn = canonical(path)
        if fqn.split(".")[0] not in own:
            _write(task, spec, module, fqn)
    parameters, buffers = parameters_of(model), buffers_of(model)
    return Values(
        tensors={fqn: t.detach() for fqn, t in {**tensors(parameters), **tensors(buffers)}.items()},
        aliases={**parameters.aliases, **buffers.aliases},
        generators=declared(model).generators if isinstance(task, LoopTask) else {},
    )


def _write(task: Task, spec: RunSpec, module: nn.Module, fqn: str) -> None:
    """Have a module reset the tensors that its constructor left empty. The others keep their values."""
    own = {n: t for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}
    empty = {name for name, tensor in own.items() if is_unwritten(tensor)}
    if not empty:
        return
    kept = {name: tensor.detach().clone() for name, tensor in own.items() if name not in empty}
    reset = partial(Task.init, task, module, fqn)
    with seeded_sections.module_init(spec.batch.seed, fqn, torch.device("cpu")), torch.no_grad():
        plainly(reset, DTYPE_OF[spec.precision], torch.initial_seed())
    with torch.no_grad():
        for name, tensor in kept.items():
            getattr(module, name).copy_(tensor)
    for name in sorted(empty):
        if is_unwritten(getattr(module, name)):
            raise ConfigError(
                field="task.model",
                problem=f"{f'{fqn}.{name}' if fqn else name!r} of {type(module).__name__} has no value: it "
                "is made by torch.empty, and nothing is written into it.",
                remedy="Give it one where it is made, or in the module's reset_parameters().",
            )


def _by_module(task: Task, spec: RunSpec, shards: Shards, models: frozenset[str] | None = None) -> None:
    assert shards.blueprint is not None
    initialise(
        shards.blueprint,
        task,
        precision=spec.precision,
        device=shards.device,
        shapes=shards.whole.shapes,
        seeded=lambda fqn: seeded_sections.module_init(spec.batch.seed, fqn, shards.device),
        cut=cut_into,
        chosen=lambda fqn: models is None or fqn.split(".")[0] in models,
    )


def _cut(values: Values, shards: Shards) -> None:
    """Copy this rank's part of each tensor."""
    registered = shards.registered.tensors.keys() if shards.registered is not None else frozenset[str]()
    _check_names(values, shards, registered)
    with torch.no_grad():
        for fqn, shard in {**shards.parameters, **shards.buffers}.items():
            if fqn not in registered:
                cut_into(in_rank_order(values.tensors[fqn], shards.whole.fused.get(fqn)), shard.detach())


def _check_names(values: Values, shards: Shards, registered: object) -> None:
    """ConfigError where the model has other tensors than when it was built without memory."""
    drawn = {fqn: shape for fqn, shape in shards.whole.shapes.items() if fqn not in registered}  # type: ignore[operator]
    here = {**shards.parameters, **shards.buffers}
    for fqn in sorted(drawn.keys() | values.tensors.keys()):
        real, shape = values.tensors.get(fqn), drawn.get(fqn)
        now = "absent" if real is None else f"{real.dtype} {list(real.shape)}"
        before = "absent" if shape is None else f"{here[fqn].dtype if fqn in here else ''} {list(shape)}"
        same = real is not None and shape is not None and tuple(real.shape) == tuple(shape)
        if real is None or not same or (fqn in here and here[fqn].dtype != real.dtype):
            raise ConfigError(
                field="task.model",
                problem=f"it makes another model each time it is called: {fqn!r} was {before}, and is {now}.",
                remedy="Let names, shapes and dtypes depend on nothing but the task's own settings.",
            )


def _compare(values: Values, shards: Shards) -> None:
    """ConfigError where ranks built other values: they come from something that the run does not seed."""
    own = {fqn: zlib.crc32(numpy_bits(t.contiguous()).data) for fqn, t in values.tensors.items()}
    total = float(zlib.crc32(repr(sorted(own.items())).encode()))
    extremes = torch.tensor([total, -total], dtype=torch.float64, device=shards.device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    if extremes[0] == -extremes[1]:
        return
    reported: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(reported, own)
    names = sorted(fqn for fqn in reported[0] if len({found.get(fqn) for found in reported}) > 1)
    raise ConfigError(
        field="task.model",
        problem=f"gives {names[0]!r} other values on each rank"
        + (f", and {len(names) - 1} tensors more." if len(names) > 1 else "."),
        remedy="Draw them from the generators of torch, numpy or random, which the run seeds before "
        "model() is called, or from a generator that is seeded there.",
    )


def agreed(shards: Shards, holds: bool) -> bool:
    """Whether it holds on all ranks. All of them call it."""
    if shards.place.devices is None:
        return holds
    least = torch.tensor(float(holds), dtype=torch.float64, device=shards.device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return bool(least)


def _ranks_here(shards: Shards) -> int:
    """On this rank's node."""
    nodes = shards.plan.nodes
    return nodes.count(nodes[shards.rank])
