from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest

from elastic_train.config import Checkpoints
from elastic_train.control.adoption import resume_commands
from elastic_train.control.commands import (
    Abort,
    Commit,
    End,
    Form,
    Go,
    Pause,
    Prune,
    Save,
    StartWorker,
    StopWorker,
)
from elastic_train.control.events import Adopted, Node, NodesChanged, StopRequested, TermBegan, WorkerReady
from elastic_train.control.fault_schedule import storm
from elastic_train.control.journal_codec import fold
from elastic_train.control.states import Forming, Pausing, Running, Settling, Waiting
from elastic_train.control.transition import transition
from elastic_train.recovery.evidence import Commitment, Fresh, FromStorage, Live
from elastic_train.testing.simulator import Simulation, simulated_policy

pytestmark = pytest.mark.ring0


def take_over(
    play,
    *,
    at: float = 0.0,
    stored=None,
    alive: str = "",
    step: int | None = None,
    strangers=(),
    silent=(),
    kept=(),
):
    """A new term whose clock starts at `at`; `alive` are the last letters of the workers that live."""
    play.at = at
    stored = stored or play.facts.saves.stored
    play(TermBegan, term=play.facts.term + 1, stored=stored, ever_stored=stored is not None, kept=kept)
    generation = play.facts.lineage.generation
    step = play.facts.lineage.step if step is None else step
    running = tuple(
        (w.name, w.node, generation, step) for w in play.facts.membership.workers if w.name[-1] in alive
    )
    return play(Adopted, running=(*running, *((name, "a", 0, 0) for name in strangers)), silent=silent)


def test_a_living_group_trains_on_under_the_new_controller(play):
    play.running(3, step=5)
    take_over(play, alive="123", step=7)
    assert isinstance(play.phase, Running)
    assert play.commands == (Go(generation=1),)
    assert play.facts.lineage.step == 7


def test_reports_of_steps_that_are_known_already_are_still_journalled_once(play):
    play.running(3, step=5)
    take_over(play, alive="123", step=7)
    known = len(play.journal)
    for number in (5, 6, 7, 6, 7):
        play.step(number)
    assert [event.step for event in play.journal[known:]] == [6, 7]
    assert play.facts.lineage.step == 7


def test_deadlines_move_to_the_new_terms_clock(play):
    play.begin(3)
    play.wait(500.0)
    take_over(play, at=3.0, alive="4")
    play.wait(90.0)
    assert isinstance(play.phase, Waiting)
    play.wait(20.0)
    assert play.phase.outcome == "capacity"


def test_a_notice_keeps_its_deadline_on_the_new_clock(play):
    play.begin(2)
    play.at = 100.0
    play.nodes("ab", leaving="b", by=150.0)
    take_over(play)
    assert play.facts.membership.nodes[1].drain_by == pytest.approx(50.0)


def test_missing_members_are_lost(replicated):
    play = replicated.running(4, step=5)
    take_over(play, alive="123")
    assert isinstance(play.phase, Settling)
    assert play.ordered(Abort)[0].workers == ("w0001", "w0002", "w0003")
    play.settle(step=5)
    assert play.ordered(Form)[0].origin == Live(generation=1, step=5)


def test_generations_of_two_terms_never_have_the_same_number(replicated):
    play = replicated.running(4, step=5)
    take_over(play, alive="123")
    play.settle(step=5)
    assert play.facts.lineage.generation == 1001


def test_a_member_in_another_generation_breaks_the_group(play):
    play.running(2, step=5)
    play(TermBegan, term=2, stored=None, ever_stored=False)
    play(Adopted, running=(("w0001", "a", 1, 5), ("w0002", "b", 9, 5)))
    assert play.phase.causes[0].detail == "w0002 is in generation 9"
    assert play.ordered(Abort)[0] == Abort(generation=9, workers=("w0002",))


def test_a_group_that_was_forming_starts_over_without_counting(play):
    play.begin(3).ready()
    take_over(play, alive="123")
    assert play.ordered(Abort) == [Abort(generation=1, workers=("w0001", "w0002", "w0003"))]
    assert len(play.ordered(Abort)) == 1
    play.settle(step=0)
    assert isinstance(play.phase, Forming)
    assert play.facts.failures.count == 0


def test_a_pause_is_asked_for_again(play):
    play.running(3, step=5)
    play.nodes("abcd")
    play.ready()
    play.wait(4.0)
    take_over(play, alive="1234")
    assert play.commands == (Go(generation=1), Pause(generation=1, save=False))


def test_a_stop_is_asked_for_again_with_its_checkpoint(play):
    play.running(3, step=5)
    play(StopRequested, reason="x")
    take_over(play, alive="123")
    assert play.commands == (Go(generation=1), Pause(generation=1, save=True))


def test_final_reports_are_asked_for_again(play):
    play.running(3, step=5)
    play.lose("w0003")
    play.settle("w0001")
    take_over(play, alive="12")
    assert play.ordered(Abort) == [Abort(generation=1, workers=("w0002",))]
    assert play.phase.pending == ("w0002",)


def test_commits_and_starts_on_their_way_are_ordered_again(play):
    play.running(2, step=5)
    play.parts(5)
    play.nodes("abc")
    commands = resume_commands(play.state, play.policy)
    assert [type(c) for c in commands] == [StartWorker, Go, Commit]


def test_a_last_checkpoint_that_is_missing_is_asked_for_again(play):
    play.running(2, step=20)
    take_over(play, alive="12")
    assert play.commands == (Go(generation=1), Save(generation=1))


def test_forming_and_ended_runs_repeat_their_command(play):
    play.begin(2).ready()
    assert isinstance(resume_commands(play.state, play.policy)[0], Form)
    play(StopRequested, reason="x")
    assert [type(c) for c in resume_commands(play.state, play.policy)] == [End]


def test_when_every_process_is_gone_the_run_starts_again_and_counts_no_failure(play):
    play.policy = replace(play.policy, max_failures=0)
    play.running(3, step=7)
    play.parts(5)
    play.saved(5)
    play.part(7, 0)
    take_over(play)
    assert isinstance(play.phase, Waiting)
    assert (play.facts.failures.count, play.facts.membership.workers, play.facts.saves.attempts) == (
        0,
        (),
        (),
    )
    play.nodes("xy")
    play.ready()
    assert play.ordered(Form)[0].origin.step == 5
    assert "2 committed steps are run again" in play.outcome.reason


def test_an_idle_worker_that_outlived_its_group_takes_part_in_the_next(play):
    play.policy = replace(play.policy, standby=1)
    late = went_back(play)
    play.nodes("bcd")
    play.ready()
    play.at = 0.0
    play(TermBegan, term=2, stored=late, ever_stored=True)
    idle = next(w for w in play.facts.membership.workers if w.node == "d")
    play(Adopted, running=((idle.name, "d", 0, 0),))
    play.nodes("def")
    play.ready()
    assert isinstance(play.phase, Forming)
    assert play.phase.origin == FromStorage(stored=late)


def test_a_worker_that_came_up_meanwhile_is_ready_and_one_that_did_not_is_lost(play):
    play.begin(3)
    take_over(play, alive="1")
    assert [(w.name, w.status) for w in play.facts.membership.workers] == [("w0001", "ready")]


def test_a_worker_that_is_still_starting_is_waited_for(play):
    play.running(2, step=5)
    play.nodes("abc")
    late = play.facts.membership.workers[2]
    take_over(play, alive="12", silent=(late.name,))
    assert play.facts.membership.workers[2].status == "starting"
    assert play.commands == (StartWorker(worker=late.name, node="c"), Go(generation=1))
    play.ready(late.name)
    assert play.facts.membership.workers[2].status == "ready"


def test_a_start_is_waited_for_where_nobody_else_is_left(play):
    play.begin(2)
    take_over(play, silent=("w0002",))
    assert [w.name for w in play.facts.membership.workers] == ["w0002"]
    assert play.commands == (StartWorker(worker="w0002", node="b"),)


def test_a_member_that_does_not_answer_is_lost_and_ended(replicated):
    play = replicated.running(3, step=5)
    take_over(play, alive="12", silent=("w0003", "w0077"))
    assert isinstance(play.phase, Settling)
    assert [c.worker for c in play.ordered(StopWorker)] == ["w0077", "w0003"]
    assert [w.name for w in play.facts.membership.workers] == ["w0001", "w0002"]


def test_strangers_are_stopped(play):
    play.running(2, step=5)
    take_over(play, alive="12", strangers=("w0077",))
    assert play.ordered(StopWorker) == [StopWorker(worker="w0077", reason="this run does not know it")]


def test_a_run_that_ended_starts_again_from_what_is_stored(play):
    play.running(2, step=6)
    play.parts(5)
    play.saved(5)
    play(StopRequested, reason="x")
    play(StopRequested, reason="x")
    play(TermBegan, term=2, stored=play.stored(5), ever_stored=True)
    assert play.phase == Waiting(since=play.at)
    assert "it had ended as stopped" in play.outcome.reason
    play(Adopted, running=())
    play.nodes("ab")
    play.ready()
    (form,) = play.ordered(Form)
    assert (form.generation, form.origin.step) == (1001, 5)
    assert form.plan.workers == ("w0003", "w0004")
    assert play.facts.lineage.step == 5


def test_a_run_whose_record_says_finished_ends(play):
    play(TermBegan, term=1, stored=None, ever_stored=True, finished=True)
    assert play.phase.outcome == "finished"


def test_the_log_has_the_final_report_on_what_is_stored(play):
    play.running(2, step=12)
    for step, slot in ((5, 1), (10, 2)):
        play.parts(step)
        play.saved(step, slot)
    take_over(play, alive="12", stored=play.stored(5, 1))
    assert play.facts.saves.stored == play.stored(5, 1)
    assert [c.stored.slot for c in play.facts.saves.commitments] == [1]
    play.parts(12)
    take_over(play, alive="12", stored=play.stored(12, 3))
    assert [c.stored.slot for c in play.facts.saves.commitments] == [1, 3]


def test_retention_knows_what_was_committed_and_not_noted(play):
    """The predecessor died between the commits of steps 7 and 10 and their records."""
    play.policy = replace(play.policy, checkpoints=Checkpoints(keep=1, best="loss"))
    play.running(2, step=12)
    play.parts(5)
    play.saved(5, 1, metrics=(("loss", 0.9),))
    losses = {1: (5, 0.9), 2: (7, 0.1), 3: (10, 0.8)}
    kept = tuple(
        Commitment(stored=play.stored(step, slot), metrics=(("loss", loss),))
        for slot, (step, loss) in losses.items()
    )
    take_over(play, alive="12", stored=play.stored(10, 3), kept=kept)
    play.parts(12)
    play.saved(12, 4, metrics=(("loss", 0.7),))
    assert play.ordered(Prune)[-1].keep == (2, 4)


def went_back(play):
    """Generation 2 went back to step 5 and on to 6; a checkpoint of generation 1 at step 7 shows up late."""
    play.running(3, step=7)
    play.parts(5)
    play.saved(5)
    play.lose("w0001")
    play.settle()
    assert isinstance(play.ordered(Form)[0].origin, FromStorage)
    play.go()
    play.step(6)
    return play.stored(7, 2, generation=1)


def test_a_newer_checkpoint_of_a_dead_lineage_is_not_taken_while_the_group_lives(play):
    late = went_back(play)
    take_over(play, alive="23", stored=late)
    assert isinstance(play.phase, Running)
    assert (play.facts.saves.stored.step, play.facts.saves.logged) == (5, None)


def test_where_nobody_lives_the_newest_checkpoint_is_taken_whatever_its_branch(play):
    late = went_back(play)
    take_over(play, stored=late)
    play.nodes("de")
    play.ready()
    (form,) = play.ordered(Form)
    assert form.origin == FromStorage(stored=late)
    assert form.lineage == ((1, 0), (1001, 7))


def test_a_run_that_ended_goes_on_from_the_newest_checkpoint_whatever_its_branch(play):
    late = went_back(play)
    play.broken("w0002", "user")
    take_over(play, stored=late)
    play.nodes("de")
    play.ready()
    assert play.ordered(Form)[0].origin == FromStorage(stored=late)


@pytest.mark.parametrize("seed", range(20))
def test_a_journal_that_was_written_under_another_configuration_still_leads_to_the_checkpoint(seed):
    """The fold may take other turns than the run did; where to go on is the log's word."""
    schedule = storm(seed, steps=15, nodes=("a", "b", "c", "d"), ranks=4, faults=4)
    run = Simulation(policy=simulated_policy(replicas=2), schedule=schedule)
    with suppress(AssertionError):
        run.limit_s = 15.0 + seed  # cut short somewhere
        run.run()
    policy = replace(
        simulated_policy(replicas=1, max_failures=seed % 2),
        min_workers=1 + seed % 3,
        max_workers=3,
        standby=0,
    )
    newest = run.cluster.storage.newest()
    state = fold(run.journal, policy)
    nodes = tuple(Node(name=n, slots=1) for n in "xyz")
    for event in (
        TermBegan(at=0.0, term=99, stored=newest, ever_stored=newest is not None),
        Adopted(at=0.0, running=()),
        NodesChanged(at=0.0, nodes=nodes),
    ):
        state = transition(state, event, policy).state
    for worker in state.facts.membership.workers:
        ready = WorkerReady(at=1.0, worker=worker.name, node=worker.node, pid=1)
        state = transition(state, ready, policy).state
    if newest is None or newest.step < policy.max_steps:
        assert isinstance(state.phase, Forming), state.phase
        assert state.phase.origin == (FromStorage(stored=newest) if newest is not None else Fresh())


def test_a_controller_that_comes_back_while_waiting_goes_on_waiting(play):
    play.running(2, step=5)
    play.nodes("a")
    play.settle()
    assert isinstance(play.phase, Waiting)
    take_over(play, alive="1")
    assert isinstance(play.phase, Waiting)
    assert not isinstance(play.phase, Pausing)
