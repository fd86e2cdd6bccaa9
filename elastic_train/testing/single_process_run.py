"""The undisturbed run of one process: no cluster, no storage, one rank that does everything."""

from __future__ import annotations

from dataclasses import replace

from elastic_train.config import RunSpec
from elastic_train.control.not_finite import NOT_FINITE, Row, reported, row_with, too_long
from elastic_train.errors import NotFinite
from elastic_train.planner.plan import Mesh, Plan, even_shares
from elastic_train.train.collectives.tcp_store import serve_store
from elastic_train.train.member import Member
from elastic_train.train.rank_assignment import RankAssignment
from elastic_train.train.step.training_loop import StepReport
from elastic_train.train.task import Task

HOST = "127.0.0.1"


def train_alone(task: Task, spec: RunSpec) -> list[StepReport]:
    """Every step's report, in this process. NotFinite ends it where it would end a run."""
    reports: list[StepReport] = []
    row: Row | None = None

    def on_step(report: StepReport) -> None:
        nonlocal row
        reports.append(report)
        row = row_with(row, report.step, skipped=report.skipped)
        if row is not None and too_long(row, spec.not_finite):
            raise NotFinite(
                worker="alone",
                rank=0,
                node="here",
                step=report.step,
                phase=NOT_FINITE,
                error=reported(row),
                traceback="",
            )

    spec = replace(spec, checkpoints=replace(spec.checkpoints, peers=None))
    server, port = serve_store(HOST)
    member = Member(task, spec, on_step=on_step)
    plan = Plan(
        mesh=Mesh(), workers=("alone",), nodes=("here",), shares=even_shares(spec.batch.micro_batches, 1)
    )
    try:
        member.join(
            RankAssignment(generation=1, rank=0, plan=plan, store_host=HOST, store_port=port, address=HOST),
        )
        member.forming.initialise()
        member.go()
        member.run()
    finally:
        member.close()
        del server  # it served until here
    return reports
