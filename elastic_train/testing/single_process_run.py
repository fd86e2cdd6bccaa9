"""The undisturbed run of one process: no cluster, no storage, one rank that does everything."""

from __future__ import annotations

from dataclasses import replace

from elastic_train.config import RunSpec
from elastic_train.planner.plan import Mesh, Plan, even_shares
from elastic_train.train.collectives.tcp_store import serve_store
from elastic_train.train.member import Member
from elastic_train.train.rank_assignment import RankAssignment
from elastic_train.train.step.training_loop import StepReport
from elastic_train.train.task import Task

HOST = "127.0.0.1"


def train_alone(task: Task, spec: RunSpec) -> list[StepReport]:
    """Every step's report, in this process."""
    reports: list[StepReport] = []
    spec = replace(spec, checkpoints=replace(spec.checkpoints, peers=None))
    server, port = serve_store(HOST)
    member = Member(task, spec, on_step=reports.append)
    plan = Plan(
        mesh=Mesh(), workers=("alone",), nodes=("here",), shares=even_shares(spec.batch.micro_batches, 1)
    )
    try:
        member.join(
            RankAssignment(generation=1, rank=0, plan=plan, store_host=HOST, store_port=port, address=HOST),
        )
        member.initialise()
        member.go()
        member.run()
    finally:
        member.close()
        del server  # it served until here
    return reports
