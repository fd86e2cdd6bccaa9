"""What a plan's ranks would hold, seen on the meta device, is what its workers do hold."""

from __future__ import annotations

import pytest

from elastic_train.planner.plan import Mesh
from elastic_train.testing.gang import Gang
from elastic_train.testing.gang_member import call
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.train.state.plan_layouts import held, plan_on
from tests.tasks.fused import FusedTask
from tests.train.equality import spec

pytestmark = pytest.mark.ring2


def test_what_is_seen_is_what_workers_hold(pool: GlooPool) -> None:
    task, run = FusedTask(), spec()
    gang = Gang(pool, task, run)
    for mesh in (Mesh(dp_shard=3), Mesh(dp_shard=2, tp=2), Mesh(pp=2, tp=2)):
        plan = plan_on(task, run, mesh)
        gang.form(gang.plan_on(mesh, stages=plan.stages))
        live = pool.run(call, "held.table", gang.generation, ranks=gang.processes)
        seen = held(task, run, plan)
        read: dict[str, int] = {}
        for own, there in zip(seen, live, strict=True):
            boxes = [(there.names[key][0], there.box(row)) for row, key in enumerate(there.key.tolist())]
            params = {
                b for b, key in zip(boxes, there.key.tolist(), strict=True) if there.names[key][1] == "param"
            }
            assert {(h.tensor, box) for h in own for box in h.boxes} == params, mesh
            for h in own:
                read[h.tensor] = read.get(h.tensor, 0) + h.reads * sum(box.numel for box in h.boxes)
        whole = {fqn: array.size for (fqn, state), array in gang.whole().items() if state == "param"}
        assert read == whole, "each element is read once"
