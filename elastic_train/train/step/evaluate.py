"""Evaluation: the same numbers under every plan, and a training state that never notices.

The data set is cut into micro-batches once. The rank that computes one writes its sums into its row of a
table; the table is gathered and added up in order of the rows, so each sample counts once and the result
doesn't depend on which rank computed what.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from elastic_train.config import Batch, RunSpec
from elastic_train.data.numbered import numbered
from elastic_train.data.order import MicroBatch, SampleOrder
from elastic_train.errors import ConfigError
from elastic_train.planner.plan import Plan
from elastic_train.train.collectives.mesh_position import MeshPosition
from elastic_train.train.collectives.process_group import Group
from elastic_train.train.dataset import Dumps, loader_of
from elastic_train.train.model.build import DTYPE_OF
from elastic_train.train.model.collate import caller, placed
from elastic_train.train.model.module_state import extra_kept
from elastic_train.train.model.positions import asking, divided_positions, here_of
from elastic_train.train.model.rng import derive, preserved, seed_all
from elastic_train.train.parallel.parallelize import compute_in
from elastic_train.train.parallel.tensor_parallel import Regions
from elastic_train.train.parallel.vocabulary_parallel_loss import of_parts, whole, whole_output
from elastic_train.train.step.kept_parameters import KeptParameters
from elastic_train.train.step.predictions import Kept, on_host, summarised
from elastic_train.train.step.stage_transfer import StageBoundary
from elastic_train.train.task import EVAL_LOSS, Evaluation, Task, takes_step
from elastic_train.train.user_code_guard import UserCodeGuard

Sums = dict[str, tuple[float, float]]
"""Name of a metric -> its sum and what it is a sum over."""


class Evaluator:
    """Evaluates a model over the ranks of one generation. All ranks call `run` after the same steps."""

    def __init__(
        self,
        task: Task,
        evaluation: Evaluation,
        spec: RunSpec,
        *,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        plan: Plan,
        rank: int,
        device: torch.device,
        group: Group | None,
        guard: UserCodeGuard,
        place: MeshPosition | None = None,
        regions: Regions | None = None,
        dumps: Dumps = pickle.dumps,
        averages: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`parameters` are those that this rank keeps; `averages` puts others in their places meanwhile.
        `place` is needed under tensor or pipeline parallelism, where several ranks run a micro-batch, and
        `regions` where tensor parallelism cuts what the loss is computed from."""
        self._task, self._evaluation, self._spec = task, evaluation, spec
        self._model, self._plan, self._rank, self._device = model, plan, rank, device
        self._group, self._guard = group, guard
        self._place, self._regions = place or MeshPosition(mesh=plan.mesh, rank=rank), regions
        self._kept: Kept = {}
        self._names: tuple[str, ...] | None = None  # of the metrics, once all ranks know them
        self._parameters = KeptParameters(parameters, several=max(plan.world_size, spec.max_workers) > 1)
        rules = task.parallelize()
        self._call = caller(model, rules.beside, "" if self._place.last else rules.hands_on)
        self._averages, self._takes_step = averages, takes_step(task)
        self._here = here_of(self._place)
        self._seed = derive(spec.batch.seed, "evaluation")
        with guard.at("building the evaluation", 0):
            dataset = numbered(evaluation.dataset)
            length = len(dataset)
            if length == 0:
                raise ConfigError(field="task.evaluation", problem="its data set holds no samples.")
            self._loader = loader_of(task, dataset, spec, dumps, seed=self._seed)
        size = evaluation.micro_size or spec.batch.micro_size
        all_of_it = Batch(global_size=length, micro_size=min(size, length), seed=self._seed, shuffle=False)
        self._micro_batches = SampleOrder(length, all_of_it).micro_batches(1)

    def due(self, step: int) -> bool:
        """Whether to evaluate the state after this step."""
        every = self._evaluation.every
        assert every != "epoch", "a run counts steps"
        return step == self._spec.max_steps or (every > 0 and step % every == 0)

    @property
    def summarises(self) -> bool:
        """Whether there are metrics of all predictions beside those of each micro-batch."""
        return self._evaluation.summary is not None

    def run(self, step: int, mark: Callable[[str, int, int], None] = lambda *_: None) -> dict[str, float]:
        """The mean of each metric over the data set, at the state after `step`; the same on every rank.
        `mark` hears of each micro-batch: an evaluation may take longer than anything that moves nobody.
        """
        found: dict[int, Sums] = {}
        self._boundary = StageBoundary(self._place, self._device) if self._place.pipe is not None else None
        with self._untouched() as parameters:
            work = self._work()
            for number, (micro, counted) in enumerate(work):
                mark("evaluation", step, micro.index)
                if self._group is not None:
                    self._group.check()
                with parameters.micro_batch():
                    sums = self._micro_batch(step, micro, [later for later, _ in work[number + 1 :]])
                if sums is not None and (counted or not found):
                    found[micro.index if counted else -1] = sums
        if self._boundary is not None:
            with self._guard.collective("evaluation", step):
                self._boundary.flush()
        return self._total(step, found) | self._summary(step, set(found))

    def rehearse(self, mark: Callable[[str, int, int], None] = lambda *_: None) -> tuple[str, ...]:
        """The first micro-batch, and as many samples as the last one has, for the errors in them; the names
        of what they measure.

        What needs all predictions is not tried: of a part it may have no value.
        """
        self._boundary = StageBoundary(self._place, self._device) if self._place.pipe is not None else None
        found: dict[int, Sums] = {}
        first, last = self._micro_batches[0], self._micro_batches[-1]
        last = replace(last, ids=first.ids[: len(last.ids)])  # as a source that is read in order has them
        with self._untouched() as parameters:
            for micro in {m.index: m for m in (first, last)}.values():
                mark("evaluation", 0, micro.index)
                with parameters.micro_batch():
                    sums = self._micro_batch(0, micro, [])
                if sums is not None:
                    found[micro.index] = sums
        if self._boundary is not None:
            with self._guard.collective("evaluation", 0):
                self._boundary.flush()
        measured = self._total(0, found)
        self._kept = {}
        return tuple(measured)

    def close(self) -> None:
        self._loader.close()

    @contextmanager
    def _untouched(self) -> Iterator[KeptParameters]:
        with (
            preserved(self._device),
            extra_kept(self._model, self._device),
            self._averages(),
            _evaluating(self._model),
        ):
            yield self._parameters

    def _work(self) -> list[tuple[MicroBatch, bool]]:
        """What this rank computes, and whether it counts; equally much on all where forward communicates."""
        mesh = self._plan.mesh
        own = self._micro_batches[mesh.dp_index(self._rank) :: mesh.dp]
        alone = mesh.dp_shard == 1  # else forward communicates with the other data-parallel ranks
        rounds = max(len(own), 1) if alone else -(-len(self._micro_batches) // mesh.dp)
        filler = own[0] if own else self._micro_batches[0]
        return [*((micro, True) for micro in own), *[(filler, False)] * (rounds - len(own))]

    def _micro_batch(self, step: int, micro: MicroBatch, upcoming: list[MicroBatch]) -> Sums | None:
        """The sums of a micro-batch; None on a stage where the model's output does not come out."""
        boundary, received = self._boundary, None
        if boundary is not None and not self._place.first:
            with self._guard.collective("evaluation", step):
                received = boundary.receive()
        with self._guard.at("evaluation", step):
            loaded = self._loader.load(micro, upcoming)
            batch = placed(loaded, self._device, DTYPE_OF[self._spec.precision])
            seed_all(derive(self._seed, "micro-batch", step, micro.index), self._device)
            with compute_in(self._device, self._spec.precision):
                with divided_positions(self._here):
                    output = self._call(self._task.inputs(batch), received)
                if boundary is not None and not self._place.last:
                    boundary.send(output)
                    return None
                metric, keep = self._evaluation.metric, self._evaluation.keep
                made = output if metric is None and keep is None else self._whole(output)
                if metric is None:
                    numbered = (step,) if self._takes_step else ()
                    with of_parts(self._regions), divided_positions(self._here), asking("task.loss"):
                        value = self._task.loss(output, batch, *numbered)
                else:
                    value = metric(made, batch)
                if keep is not None and self._place.speaks:
                    self._kept[micro.index] = on_host(keep(made, batch))
        return _sums(whole(value))

    def _whole(self, output: Any) -> Any:
        return whole_output(output, self._place.context)

    def _summary(self, step: int, counted: set[int]) -> dict[str, float]:
        """Of everything that was kept: each sample once, though ranks may have repeated some."""
        kept, self._kept = self._kept, {}
        if self._evaluation.summary is None:
            return {}
        own = {index: part for index, part in kept.items() if index in counted}
        with self._guard.at("evaluation", step), preserved(self._device):
            seed_all(derive(self._seed, "summary", step), self._device)
            return summarised(own, self._evaluation.summary, world_size=self._plan.world_size)

    def _total(self, step: int, found: Mapping[int, Sums]) -> dict[str, float]:
        own = sorted(next(iter(found.values()))) if found else []
        odd = next((sums for sums in found.values() if sorted(sums) != own), None)
        # Ranks must agree before tables of different widths meet: gloo ends the process then.
        with self._guard.collective("gathering the evaluation", step):
            names = self._agreed("\0".join(own) if odd is None else f"rank {self._rank}")
        if odd is not None or names is None:
            raise ConfigError(
                field="task.evaluation.metric",
                problem=f"it must return the same names for every micro-batch, here {own}"
                + (f" and {sorted(odd)}." if odd is not None else ", elsewhere others."),
            )
        table = torch.zeros(len(self._micro_batches), len(names), 2, dtype=torch.float64)
        # Under cp a loss is of the positions that are here, and a metric of all of them.
        says = self._place.counts if self._evaluation.metric is None else self._place.speaks
        for index, sums in found.items():
            if index >= 0 and says:
                table[index] = torch.tensor([sums[name] for name in names], dtype=torch.float64)
        table = table.to(self._device)
        with self._guard.collective("gathering the evaluation", step):
            if self._plan.world_size > 1:
                dist.all_reduce(table)
            totals = table.sum(0).tolist()
        return {
            name: total / count if count > 0 else math.nan
            for name, (total, count) in zip(names, totals, strict=True)
        }

    def _agreed(self, text: str) -> tuple[str, ...] | None:
        """The names of the metrics that all ranks with an output found; None where they differ."""
        if self._plan.world_size == 1:
            return tuple(text.split("\0"))
        data = text.encode() if self._place.last else b""
        number = int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "little")
        least = float(number) if self._place.last else math.inf
        most = float(number) if self._place.last else -math.inf
        extremes = torch.tensor([most, -least, len(data)], dtype=torch.float64, device=self._device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        if extremes[0] != -extremes[1]:
            return None
        if self._names is None:
            letters = torch.zeros(int(extremes[2]), dtype=torch.uint8, device=self._device)
            letters[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
            dist.all_reduce(letters, dist.ReduceOp.MAX)
            self._names = tuple(bytes(letters.tolist()).decode().split("\0"))
        return self._names


def _sums(value: Any) -> Sums:
    """What a metric returned, by name."""
    pairs = value if isinstance(value, Mapping) else {EVAL_LOSS: value}
    found: Sums = {}
    for name, pair in pairs.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigError(
                field="task.evaluation.metric",
                problem=f"{name!r} must be a pair of a sum and its count, not {type(pair).__name__}.",
            )
        found[str(name)] = float(pair[0]), float(pair[1])
    return found


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; modes, buffers and sharding are put back, whatever forward did."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, tensor, None if tensor is None else tensor.clone())
        for module in model.modules()
        for name, tensor in module._buffers.items()
    ]
    model.eval()
    try:
        with torch.no_grad():
            yield
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
    finally:
        for module, training in modes:
            module.training = training
        for module, name, tensor, kept in buffers:
            module._buffers[name] = tensor
            if tensor is not None and kept is not None and not torch.equal(tensor, kept):
                tensor.copy_(kept)
