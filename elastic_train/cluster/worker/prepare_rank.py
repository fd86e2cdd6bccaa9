"""Make a worker's rank of the next group ready beside the group that trains, or forget it.

What connects runs on the caller's thread, off the path of a step. What builds a model belongs to the training
thread, and a newcomer's has nothing else to do.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic_train.cluster.faults.fault_injector import FaultInjector
from elastic_train.cluster.worker.training_thread import TrainingThread
from elastic_train.train.member import Member
from elastic_train.train.rank_assignment import RankAssignment


def prepare(
    member: Member, training: TrainingThread, assignment: RankAssignment, reached: Callable[[str], None]
) -> None:
    """Connect to the next group; a newcomer builds its model too. Whoever fails leaves nothing behind."""
    try:
        reached("asked")
        member.connect_ahead(assignment, reached)
        reached("axes connected")
        if member.holds_nothing:
            training.submit(lambda: member.build_ahead(assignment, reached)).result()
        reached("ready")
    except BaseException:
        dismiss(member, training, *assignment.meeting)
        raise


def dismiss(member: Member, training: TrainingThread, generation: int, number: int) -> None:
    """Forget what was made ready; number 0: whatever it is."""
    member.dismiss(generation, number)
    training.submit(lambda: member.leave_built(generation, number))


def points(injector: FaultInjector | None, assignment: RankAssignment) -> Callable[[str], None]:
    """What is called at each point of a preparation, where a test may strike."""

    def reached(point: str) -> None:
        if injector is not None:
            injector.preparing(assignment.rank, assignment.step, point)

    return reached
