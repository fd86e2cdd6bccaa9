from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.control.commands import Abort, End, Form, StopWorker
from elastic_train.control.events import Cause, FinalReport, GroupBroken, WorkerLost
from elastic_train.control.states import Ended, Forming, Running, Settling, Waiting
from elastic_train.recovery.evidence import Fresh, FromStorage, Live, Vote
from tests.control.conftest import shown_only

pytestmark = pytest.mark.ring0


def vote(step: int) -> Vote:
    return Vote(step=step, values=(float(step),))


def test_a_lost_worker_aborts_the_group_on_every_worker_that_lives(play):
    play.running(3)
    play.lose("w0002")
    assert play.ordered(Abort) == [Abort(generation=1, workers=("w0001", "w0003"))]
    assert isinstance(play.phase, Settling)


def test_the_next_group_waits_for_every_final_report_and_for_no_cold_start(replicated):
    play = replicated.running(4, step=5)
    play.lose("w0004")
    play.settle("w0001", "w0002")
    assert isinstance(play.phase, Settling)
    play.settle("w0003")
    (form,) = play.ordered(Form)
    assert form.plan.workers == ("w0001", "w0002", "w0003")
    assert form.origin == Live(generation=1, step=5)
    assert form.holders == ("w0001", "w0002", "w0003")
    assert "no committed step is lost" in play.outcome.reason


def test_a_word_before_the_abort_is_itself_the_sign(replicated):
    play = replicated.running(4, step=5)
    play.settle("w0001", error=Cause(kind="collective", detail="reset"))
    assert play.ordered(Abort) == [Abort(generation=1, workers=("w0002", "w0003", "w0004"))]
    play.settle()
    assert isinstance(play.phase, Forming)


def test_a_worker_that_stops_by_itself_breaks_the_group(play):
    play.running(3, step=5)
    play.settle("w0001")
    assert play.phase.causes == (Cause(kind="collective", detail="w0001 stopped by itself"),)


def test_repeated_words_change_nothing(replicated):
    play = replicated.running(4, step=5)
    play.lose("w0004")
    play.settle("w0001")
    before = play.state
    play.settle("w0001")
    play.lose("w0004")
    play.broken("w0001")
    assert play.state is not before  # a second sign adds a cause
    before = play.state
    play.broken("w0001")
    assert play.state is before


def test_a_survivor_that_entered_the_vote_rolls_forward_with_its_known_outcome(play):
    play.running(3, step=5)
    play.broken("w0001")
    play.settle("w0001", step=6, applied=vote(6))
    play.settle("w0002", "w0003", step=5, reached=6)
    (form,) = play.ordered(Form)
    assert form.origin == Live(generation=1, step=6, vote=vote(6))
    assert play.facts.lineage.step == 6
    assert "rolling forward" in play.outcome.reason


def test_a_vote_that_nobody_saw_is_run_again(play):
    play.running(3, step=5)
    play.broken("w0001")
    play.settle(step=5, reached=6)
    assert play.ordered(Form)[0].origin == Live(generation=1, step=5)


def test_a_vote_that_only_the_controller_saw_is_applied(play):
    play.running(3, step=6)
    play.broken("w0001")
    play.settle(step=5, reached=6)
    assert play.ordered(Form)[0].origin == Live(generation=1, step=6, vote=Vote(step=6, values=(6.0,)))


def test_a_commit_that_is_told_late_still_counts(play):
    play.running(3, step=5)
    play.broken("w0001")
    play.settle("w0001", "w0002", step=5, reached=6)
    play.step(6)
    play.settle("w0003", step=5, reached=6)
    assert play.ordered(Form)[0].origin.step == 6


def test_words_of_an_older_generation_are_fenced(replicated):
    play = replicated.running(4, step=5)
    play.lose("w0004")
    play.settle()
    before = play.state
    cause = Cause(kind="user", detail="late")
    play(GroupBroken, generation=1, worker="w0001", cause=cause)
    assert play.outcome.reason == "fenced: generation 1 is gone"
    play(FinalReport, generation=1, worker="w0001", local_states=(), error=cause)
    play.step(6, generation=1)
    assert play.state is before


def test_a_failure_while_forming_starts_the_choice_again_from_what_is_left(replicated):
    play = replicated.running(4, step=5)
    play.lose("w0004")
    words = {w: play.local_state(w, 5) for w in ("w0001", "w0002", "w0003")}
    play.settle()
    play.lose("w0003")
    assert play.ordered(Abort) == [Abort(generation=2, workers=("w0001", "w0002"))]
    for worker in ("w0001", "w0002"):
        play(FinalReport, generation=2, worker=worker, local_states=(words[worker],))
    (form,) = play.ordered(Form)
    assert (form.generation, form.origin) == (3, Live(generation=1, step=5))
    assert form.lineage == ((1, 0), (3, 5))


def test_a_group_that_was_filled_before_it_broke_may_be_the_source(replicated):
    play = replicated.running(4, step=5)
    play.lose("w0004")
    play.settle()
    play.broken("w0001")
    play.settle()
    assert play.ordered(Form)[0].origin == Live(generation=2, step=5)
    assert play.ordered(Form)[0].lineage == ((1, 0), (2, 5), (3, 5))


def test_a_worker_that_gives_no_final_report_is_stopped_and_counts_as_lost(replicated):
    play = replicated.running(4, step=5)
    play.broken("w0001")
    play.settle("w0001", "w0002", "w0003")
    play.wait(9.0)
    assert isinstance(play.phase, Settling)
    play.wait(2.0)
    assert play.ordered(StopWorker) == [StopWorker(worker="w0004", reason="it gave no final report")]
    assert play.ordered(Form)[0].plan.workers == ("w0001", "w0002", "w0003")


def test_a_word_of_a_worker_that_was_given_up_is_ignored(replicated):
    play = replicated.running(4, step=5)
    play.broken("w0001")
    play.lose("w0002")
    before = play.state
    play.settle("w0002")
    assert play.state is before


def test_without_coverage_the_checkpoint_is_the_way_back(play):
    play.running(3, step=7)
    play.parts(5)
    play.saved(5)
    play.lose("w0001")
    play.nodes("abc")
    play.settle()
    (form,) = play.ordered(Form)
    assert form.origin == FromStorage(stored=play.stored(5, generation=1))
    assert play.facts.lineage.step == 5
    assert "2 committed steps are run again" in play.outcome.reason


def test_before_the_first_checkpoint_a_run_may_start_afresh_and_says_so(play):
    play.running(3, step=2)
    play.lose("w0001")
    play.settle()
    assert play.ordered(Form)[0].origin == Fresh()
    assert "from step 0" in play.outcome.reason
    assert "2 committed steps are run again" in play.outcome.reason


def test_newer_state_of_a_left_lineage_is_dead(play):
    play.policy = replace(play.policy, plan=shown_only(play.policy.plan, lambda n: n // 2 * 2))
    play.running(4, step=7)
    play.parts(5)
    play.saved(5)
    play.lose("w0004")
    play.settle()  # nobody holds rank 3: back to 5, in a group of two; w0003 keeps its shard of step 7
    assert [name for name, _ in play.facts.survived.local_states] == ["w0001", "w0002", "w0003"]
    play.go()
    play.step(6)
    play.lose("w0001")
    play.nodes("abcd")
    play.settle("w0002", step=6)
    assert play.ordered(Form)[0].origin == FromStorage(stored=play.stored(5, generation=1))


# -- verdicts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["starting", "waiting", "running", "settling"])
def test_a_user_error_ends_the_run_at_once_with_its_traceback(replicated, phase):
    play = replicated
    cause = Cause(kind="user", detail="ValueError: no", phase="forward", step=3, traceback="Traceback ...")
    match phase:
        case "starting":
            play.begin(3)
            play.lose("w0001", "user")
        case "waiting":
            play.begin(3).ready("w0001")
            play.lose("w0001", "user")
        case "running":
            play.running(4, step=2)
            play(GroupBroken, generation=1, worker="w0002", cause=cause)
        case _:
            play.running(4, step=2)
            play.broken("w0001")
            play.settle("w0002", error=cause)
    (end,) = play.ordered(End)
    assert end.outcome == "user_error"
    if phase in ("running", "settling"):
        assert (end.cause, end.worker) == (cause, "w0002")
        assert "forward of step 3" in end.detail


def test_a_worker_that_does_not_start_where_others_train_says_something_of_its_machine(replicated):
    play = replicated.running(3, step=2)
    play.lose("w0003")
    play.settle()
    (new,) = [w.name for w in play.facts.membership.workers if w.status == "starting"]
    play.lose(new, "user", phase="configuration")
    assert not play.ordered(End)
    assert f"lost {new} (death: {new} ended)" in play.outcome.reason


def test_a_user_error_before_the_first_step_names_neither_a_step_nor_nobody(play):
    play.running(2)
    cause = Cause(kind="user", detail="the data set is another one", phase="configuration")
    play(GroupBroken, generation=1, worker="", cause=cause)
    (end,) = play.ordered(End)
    assert end.detail == "the job's own code raised in configuration: the data set is another one"


def test_the_earliest_error_that_is_not_a_collectives_is_the_cause(replicated):
    play = replicated.running(4, step=5)
    play.broken("w0001")
    play.settle("w0001", error=Cause(kind="collective", detail="reset"))
    play.settle("w0002", error=Cause(kind="engine", detail="bad index"))
    play.settle("w0003", error=Cause(kind="memory", detail="full"))
    play.settle("w0004")
    assert "cause: engine, bad index" in play.outcome.reason


def fail(play, worker: str = "w0002", **cause) -> None:
    """The group breaks and every worker settles where it is."""
    play.broken(worker, **cause)
    play.settle()
    if isinstance(play.phase, Forming):
        play.go()


def test_the_same_engine_fault_twice_is_deterministic(replicated):
    play = replicated.running(4, step=5)
    fail(play, kind="engine", detail="bad index", step=6)
    assert isinstance(play.phase, Running)
    fail(play, kind="engine", detail="bad index", step=6)
    assert play.phase.outcome == "infrastructure"
    assert play.phase.detail == "the same fault twice at step 6: bad index"


def test_memory_that_runs_out_twice_in_a_phase_is_named(replicated):
    play = replicated.running(4, step=5)
    fail(play, kind="memory", detail="480 MB of 512 MB", phase="backward", step=6)
    fail(play, kind="memory", detail="490 MB of 512 MB", phase="backward", step=6)
    assert play.phase.outcome == "infrastructure"
    assert "likely out of memory" in play.phase.detail
    assert "490 MB of 512 MB" in play.phase.detail


def test_workers_that_are_killed_for_memory_twice_without_progress_end_the_run(replicated):
    play = replicated.running(4, step=2)
    for _ in range(2):
        assert isinstance(play.phase, Running)
        detail = "w0002 (rank 1) was killed at step 3: it held 480.0 MiB"
        cause = Cause(kind="memory", detail=detail, step=3, rank=1)
        play(WorkerLost, worker=play.plan.workers[1], cause=cause)
        play.ready()
        play.settle()
        if isinstance(play.phase, Forming):
            play.go()
    assert play.phase.outcome == "infrastructure"
    assert play.phase.detail == f"likely out of memory, twice: {detail}"


def test_other_faults_in_between_are_not_the_same_wall(replicated):
    play = replicated.running(4, step=5)
    fail(play, kind="memory", detail="full", phase="backward", step=6)
    fail(play, kind="memory", detail="full", phase="forward", step=6)
    fail(play, kind="engine", detail="bad index", step=6)
    assert isinstance(play.phase, Running)


def test_failures_without_progress_spend_the_budget(replicated):
    play = replicated.running(4, step=5)
    for _ in range(3):
        fail(play)
        assert isinstance(play.phase, Running)
    fail(play)
    assert play.phase.outcome == "infrastructure"
    assert play.phase.detail.startswith("4 failures without progress between them, 3 are allowed")


def test_progress_gives_the_budget_back(replicated):
    play = replicated.running(4, step=5)
    for number in range(6, 16):
        fail(play)
        play.step(number)
    assert isinstance(play.phase, Running)
    assert (play.facts.failures.count, play.facts.failures.ever) == (0, 10)


def test_running_old_steps_again_is_no_progress(play):
    play.running(3, step=2)
    for _ in range(4):
        play.lose(play.plan.workers[0])
        play.ready()
        play.settle()
        if isinstance(play.phase, Ended):
            break
        play.go()
        play.step(1)
        play.step(2)
    assert play.phase.outcome == "infrastructure"


def test_preemptions_do_not_count_as_failures(replicated):
    play = replicated.running(4, step=5)
    for _ in range(5):
        play.lose(play.plan.workers[-1], "preemption")
        play.ready()
        play.settle()
        play.go()
    assert isinstance(play.phase, Running)
    assert play.facts.failures.count == 0


def test_a_loss_on_a_draining_node_is_a_preemption(replicated):
    play = replicated.running(4, step=5)
    play.nodes("abcd", leaving="d", by=play.at + 500.0)
    play.lose("w0004")
    play.settle()
    assert play.facts.failures.count == 0


def test_after_a_loss_below_the_minimum_the_run_waits_and_forms_with_the_first_newcomer(play):
    play.running(2, step=5)
    play.saved(5)
    play.nodes("a")
    play.settle()
    assert isinstance(play.phase, Waiting)
    play.nodes("ac")
    play.ready()
    assert play.ordered(Form)[0].plan.workers == ("w0001", "w0003")


def test_a_group_that_does_not_form_in_time_is_aborted(play):
    play.begin(2).ready()
    play.wait(21.0)
    assert play.ordered(Abort) == [Abort(generation=1, workers=("w0001", "w0002"))]


def test_a_whole_last_checkpoint_on_its_way_is_not_disturbed_by_a_death(play):
    play.running(3, step=20)
    play.parts(20)
    play.lose("w0001")
    assert isinstance(play.phase, Running)
    play.saved(20)
    assert play.phase.outcome == "finished"
