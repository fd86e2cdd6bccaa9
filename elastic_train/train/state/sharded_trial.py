"""Try a task's forward and backward on sharded parameters before a run, on the meta device.

The model is divided as two ranks of dp_shard would, in a group that communicates with nobody, and runs on
tensors that have shapes and no values.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from elastic_train.config import RunSpec
from elastic_train.data.numbered import tell_epoch
from elastic_train.planner.plan import Mesh
from elastic_train.train.declaration.loop_task import LoopTask
from elastic_train.train.model.build import allocate, draw, tensors
from elastic_train.train.model.collate import caller, placed
from elastic_train.train.model.lbfgs import LBFGS
from elastic_train.train.model.plain_build import DTYPE_OF
from elastic_train.train.model.surroundings import Surroundings
from elastic_train.train.model.user_hooks import hang
from elastic_train.train.parallel.parallelize import divide
from elastic_train.train.state.plan_layouts import alone, plan_on
from elastic_train.train.state.units_by_chance import SmallDraws, UnitsByChance, check_units
from elastic_train.train.task import Task, takes_step

CPU = torch.device("cpu")


def sharding_fails(task: Task, spec: RunSpec) -> str | None:
    """What forward or backward raises where parameters are sharded and not where they are whole.

    None where they run, where they need values (a branch on data), and for most loops, whose steps are their
    own.
    """
    if isinstance(task, LoopTask):
        return sets_data(task) or evaluates_itself(task, spec)
    failure = _raised(task, spec, Mesh(dp_shard=2))
    if failure is None or _raised(task, spec, Mesh()) is not None:
        return None
    return failure


def sets_data(task: LoopTask) -> str | None:
    """Which function of a loop puts other data into tensors: of one that is cut, torch lets that go by."""
    found = Surroundings.of([task.loop]).sets_data
    return (
        f"{min(found)} assigns to the .data of a tensor, which does nothing where it is cut"
        if found
        else None
    )


def evaluates_itself(task: LoopTask, spec: RunSpec) -> str | None:
    """Which optimizer of a loop works on all of its parameters as one vector."""
    draw(task, spec.precision, spec.batch.seed)
    names = [name for name, one in task.optimizers.items() if isinstance(one, LBFGS)]
    return f"the optimizer {names[0]!r} is L-BFGS, which needs parameters whole" if names else None


def _raised(task: Task, spec: RunSpec, mesh: Mesh) -> str | None:
    plan = plan_on(task, spec, mesh)
    with alone(plan, 0) as device_mesh, torch.random.fork_rng(devices=[]):
        blueprint, rules = draw(task, spec.precision, spec.batch.seed), task.parallelize()
        dataset = task.dataset()
        tell_epoch(dataset, 0)
        samples = [dataset[0]] * spec.batch.micro_size
        try:
            batch = placed(task.collate(samples), CPU, DTYPE_OF[spec.precision])
            blueprint = divide(blueprint, rules, plan, 0, device_mesh, CPU).blueprint
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                allocate(blueprint, CPU)
                hang(blueprint.hooks, tensors(blueprint.parameters))
                batch = pytree.tree_map_only(
                    torch.Tensor, lambda t: t if isinstance(t, FakeTensor) else mode.from_tensor(t), batch
                )
                numbered = (1,) if takes_step(task) else ()
                call = caller(blueprint.model)
                check_units(blueprint.model, mode, lambda: call(task.inputs(batch)))
                with SmallDraws(mode):
                    loss, _ = task.loss(call(task.inputs(batch)), batch, *numbered)
                    loss.backward()
        except UnitsByChance as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - whatever the job's code raises there, it is what is asked
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None
