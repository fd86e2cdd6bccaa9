"""A group that stands still is found, and who holds it up is named; a slow one is left alone."""

from __future__ import annotations

import pytest

from elastic_train.config import Timing
from elastic_train.control.commands import Abort, End, StopWorker
from elastic_train.control.events import Cause, Hung, Straggling
from elastic_train.control.hang_detection import Mark, culprit, limit_of, stalled
from elastic_train.control.states import Forming, Settling
from elastic_train.control.stragglers import Pace

pytestmark = pytest.mark.ring0

TIMING = Timing(stall_s=30.0, progress_s=600.0)
WAITING = 'File ".../torch/distributed/distributed_c10d.py", line 1, in all_reduce'
COMPUTING = 'File "job.py", line 3, in forward'


def marks(*at: tuple[str, float], step: int = 7) -> list[Mark]:
    return [
        Mark(worker=f"w{rank}", rank=rank, step=step, phase=phase, seconds=seconds)
        for rank, (phase, seconds) in enumerate(at)
    ]


def test_a_deadline_is_relative_to_the_measured_step() -> None:
    assert limit_of("forward", 1.0, TIMING) == 30.0
    assert limit_of("forward", 10.0, TIMING) == 200.0
    assert limit_of("forward", 100.0, TIMING) == 600.0, "nothing takes longer than no progress at all"
    assert limit_of("forward", 0.0, TIMING) == 600.0, "nobody knows how long a first step takes"
    assert limit_of("save", 1.0, TIMING) == limit_of("evaluation", 1.0, TIMING) == 600.0


def test_a_rank_that_is_ten_times_slower_is_no_stall() -> None:
    for step_s in (0.1, 2.0, 10.0):
        waiting = marks(("reduce", 9 * step_s), ("reduce", 9 * step_s), ("forward", 10 * step_s))
        assert stalled(waiting, step_s, TIMING) is None


def test_a_group_in_which_one_still_moves_does_not_stand_still() -> None:
    assert stalled(marks(("reduce", 100.0), ("forward", 5.0)), 1.0, TIMING) is None
    assert stalled(marks(("reduce", 100.0), ("save", 100.0)), 1.0, TIMING) is None
    assert stalled(marks(("settled", 1e6), ("idle", 1e6)), 1.0, TIMING) is None


def test_the_rank_that_is_furthest_behind_is_named() -> None:
    stall = stalled(marks(("reduce", 31.0), ("forward", 40.0), ("vote", 31.0)), 1.0, TIMING)
    assert stall is not None
    who = culprit(stall, {"w0": WAITING, "w1": COMPUTING, "w2": WAITING})
    assert who is not None
    assert who.worker == "w1"
    silent = culprit(stall, {"w0": WAITING, "w2": WAITING})
    assert silent is not None, "one that doesn't answer is no less suspect"
    assert silent.worker == "w1"


def test_a_rank_inside_the_jobs_own_edit_of_gradients_is_behind_those_that_wait_to_vote() -> None:
    assert limit_of("gradients", 1.0, TIMING) == 600.0, "nobody knows how long the job's own code takes"
    waiting = marks(("vote", 40.0), ("gradients", 40.0), ("vote", 40.0))
    assert stalled(waiting, 1.0, TIMING) is None
    stall = stalled(marks(("vote", 700.0), ("gradients", 700.0), ("vote", 700.0)), 1.0, TIMING)
    assert stall is not None
    assert [m.worker for m in stall.suspects] == ["w1"]


def test_among_equals_the_one_whose_stack_is_in_no_collective_is_named() -> None:
    stall = stalled(marks(("forward", 40.0), ("forward", 40.0), ("forward", 40.0)), 1.0, TIMING)
    assert stall is not None
    who = culprit(stall, {"w0": WAITING, "w1": WAITING, "w2": COMPUTING})
    assert who is not None
    assert who.worker == "w2"
    assert culprit(stall, {f"w{i}": WAITING for i in range(3)}) is None, "nobody stands out"
    assert culprit(stall, {f"w{i}": COMPUTING for i in range(3)}) is None


def hang(worker: str = "w0002", step: int = 6, phase: str = "forward") -> dict:
    cause = Cause(kind="hang", detail=f"{worker} has been in {phase}", phase=phase, step=step)
    return {"worker": worker, "cause": cause, "stacks": (("w0001", WAITING), (worker, COMPUTING))}


def test_the_worker_that_hangs_is_ended_and_the_others_go_on(replicated) -> None:
    play = replicated.running(4, step=5)
    play(Hung, generation=play.facts.lineage.generation, **hang())
    assert [c.worker for c in play.ordered(StopWorker)] == ["w0002"]
    assert play.ordered(Abort)[0].workers == ("w0001", "w0003", "w0004")
    play.settle()
    assert isinstance(play.phase, Forming)
    assert "w0002" not in play.phase.plan.workers


def test_a_hang_that_nobody_stands_out_in_breaks_the_group_and_ends_nobody(replicated) -> None:
    play = replicated.running(4, step=5)
    play(Hung, generation=play.facts.lineage.generation, **{**hang(), "worker": ""})
    assert play.ordered(StopWorker) == []
    assert isinstance(play.phase, Settling)


def test_the_same_hang_at_the_same_step_twice_ends_the_run(replicated) -> None:
    play = replicated.running(4, step=5)
    play(Hung, generation=play.facts.lineage.generation, **hang())
    play.settle()
    play.go()
    play(Hung, generation=play.facts.lineage.generation, **hang(worker="w0003"))
    play.settle()
    (over,) = play.ordered(End)
    assert "the same fault twice at step 6" in over.detail


def test_a_stale_word_of_a_hang_changes_nothing(replicated) -> None:
    play = replicated.running(4, step=5)
    before = play.state
    play(Hung, generation=play.facts.lineage.generation - 1, **hang())
    assert play.state is before


def test_a_chronic_straggler_is_named_within_ten_steps_and_a_single_stall_is_no_alarm() -> None:
    pace = Pace()
    for step in range(1, 11):
        for rank in range(3):
            pace.heard(rank, step, 0.3 if rank == 2 else 0.1)
    assert slow_of(pace) == {2: pytest.approx(3.0)}

    once = Pace()
    for step in range(1, 30):
        for rank in range(3):
            once.heard(rank, step, 5.0 if (rank, step) == (1, 10) else 0.1)
    assert slow_of(once) == {}


def test_a_heartbeat_that_repeats_a_step_counts_once() -> None:
    pace = Pace()
    for _ in range(20):
        for rank in range(3):
            pace.heard(rank, 1, 0.3 if rank == 2 else 0.1)
    assert slow_of(pace) == {}


def test_who_is_slow_is_noted_and_reported_where_shares_cannot_differ(replicated) -> None:
    play = replicated.running(4, step=5)
    word = {"generation": play.facts.lineage.generation, "worker": "w0002", "node": "b", "rank": 1}
    play(Straggling, factor=2.5, **word)
    assert play.facts.membership.slow == (("w0002", 2.5),)
    assert play.outcome.reason.startswith("w0002 (rank 1, node b) is 2.5 times slower than its peers")
    assert play.commands == ()
    play(Straggling, factor=0.0, **word)
    assert play.facts.membership.slow == ()
    assert "keeps up again" in play.outcome.reason


def test_ranks_are_compared_within_their_stage():
    pace = Pace(stages={0: 0, 1: 0, 2: 1, 3: 1, 4: 2})
    for step in range(1, 8):
        for rank, seconds in enumerate((1.0, 1.1, 3.0, 9.0, 50.0)):
            pace.heard(rank, step, seconds)
    assert slow_of(pace) == {3: pytest.approx(3.0)}, "one of its stage, and one alone in its own"


def test_a_rank_keeps_being_slow_until_it_has_kept_up_for_some_steps() -> None:
    pace = Pace(slow={1})
    assert pace.slowness(1) is None, "known from the group before, and not heard of in this one"
    for step in range(1, 5):
        for rank in range(3):
            pace.heard(rank, step, 0.1)
    assert pace.slowness(1) == pytest.approx(1.0)
    for rank in range(3):
        pace.heard(rank, 5, 0.1)
    for rank in range(3):
        pace.heard(rank, 6, 0.1)
    assert pace.slowness(1) == 0.0


def slow_of(pace: Pace) -> dict[int, float | None]:
    return {rank: factor for rank in pace.steps if (factor := pace.slowness(rank)) != 0.0}
