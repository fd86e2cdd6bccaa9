"""The next group is made ready while the present one trains; whatever comes between leaves that as it was."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from elastic_train.control.commands import Dismiss, Form, Pause, Prepare
from elastic_train.control.events import Adopted, Cause, NotPrepared, Prepared, StopRequested, TermBegan
from elastic_train.control.fault_schedule import (
    AddNode,
    BreakRank,
    DrainNode,
    FaultSchedule,
    KillController,
    KillNode,
    KillRank,
    Moment,
    StopRank,
    storm,
)
from elastic_train.control.journal_codec import decode_state, encode_state
from elastic_train.control.preparation import due_at
from elastic_train.control.states import Forming, Pausing, Running, Settling
from elastic_train.control.waits import waits
from elastic_train.testing.simulated_faults import CutOff
from elastic_train.testing.simulator import Simulation, simulated_policy

pytestmark = pytest.mark.ring0

NODES = ("a", "b", "c", "d")


@pytest.fixture
def ahead(play):
    play.policy = replace(play.policy, prepares=True)
    return play


@pytest.fixture
def growing(ahead):
    """Two workers train, and a third one is there: its group is being made ready."""
    ahead.running(2, step=3)
    ahead.nodes("abc")
    ahead.ready()
    ahead.wait(4.0)
    return ahead


@pytest.fixture
def leaving(ahead):
    """Three workers train, and one of their nodes is going to go."""
    ahead.running(3, step=3)
    ahead.nodes("abc", leaving="b", by=1000.0)
    return ahead


def prepared(play, number=1):
    return play(Prepared, generation=play.facts.lineage.generation, number=number, seconds=0.5)


def failed(play, number=1):
    cause = Cause(kind="collective", detail="reset")
    return play(NotPrepared, generation=play.facts.lineage.generation, number=number, cause=cause)


def test_a_growth_is_made_ready_before_the_group_pauses(growing):
    (order,) = growing.commands
    assert isinstance(order, Prepare)
    assert (order.generation, order.beside, order.number, order.step) == (2, 1, 1, 3)
    assert order.plan.workers == ("w0001", "w0002", "w0003")
    growing.step(4)
    assert isinstance(growing.phase, Running)
    prepared(growing)
    assert growing.commands == (Pause(generation=1),)
    growing.step(5)
    growing.settle()
    (form,) = growing.ordered(Form)
    assert (form.generation, form.prepared, form.plan) == (2, 1, order.plan)
    assert not growing.ordered(Dismiss)
    assert isinstance(growing.phase, Forming)
    growing.go()
    assert growing.step(6).state.facts.lineage.step == 6


def test_a_drain_is_made_ready_too_and_goes_without_where_its_end_is_near(leaving):
    (order,) = leaving.commands
    assert isinstance(order, Prepare)
    assert order.plan.workers == ("w0001", "w0003")
    leaving.wait(900.0)
    assert not leaving.commands
    leaving.wait(95.0)
    dismiss, pause = leaving.commands
    assert dismiss == Dismiss(generation=2, number=1, workers=("w0001", "w0003"))
    assert pause == Pause(generation=1)
    leaving.settle()
    assert [form.prepared for form in leaving.ordered(Form)] == [0]


@pytest.mark.parametrize("what", ["newcomer dies", "another comes", "a node leaves", "member dies", "stop"])
@pytest.mark.parametrize("ready", [False, True])
def test_whatever_comes_between_forgets_it(growing, what, ready):
    if ready:
        prepared(growing)
        assert isinstance(growing.phase, Pausing)
    match what:
        case "newcomer dies":
            growing.lose("w0003")
        case "another comes":
            growing.nodes("abcd")
            growing.ready()
        case "a node leaves":
            growing.nodes("abc", leaving="b")
        case "member dies":
            growing.lose("w0002")
        case "stop":
            growing(StopRequested, reason="asked")
    if ready and isinstance(growing.phase, Pausing) and what != "stop":
        growing.settle()
        assert [form.prepared for form in growing.ordered(Form)] == [0]
    assert growing.ordered(Dismiss)
    assert all(d.workers == ("w0001", "w0002", "w0003") for d in growing.ordered(Dismiss))
    kind = {"stop": Pausing, "member dies": Settling}.get(what, Forming if ready else Running)
    assert isinstance(growing.phase, kind)
    assert growing.facts.failures.count == 0


def test_one_that_fails_leaves_the_group_as_it_is_and_is_not_tried_again_with_the_same_workers(growing):
    before = growing.phase
    failed(growing)
    assert isinstance(growing.phase, Running)
    assert growing.phase.plan == before.plan
    assert growing.ordered(Dismiss)
    growing.step(4)
    assert not growing.commands
    growing.wait(70.0)
    assert growing.ordered(Pause), "asked again, it goes without"
    assert not growing.ordered(Prepare)


def test_a_drain_that_was_not_made_ready_goes_without_at_once(leaving):
    failed(leaving)
    assert leaving.ordered(Dismiss)
    assert leaving.ordered(Pause)


def test_words_of_another_preparation_change_nothing(growing):
    before = growing.state
    assert prepared(growing, number=2).state is before
    assert failed(growing, number=2).state is before
    growing.lose("w0003")
    assert prepared(growing).state.phase.preparation is None


def test_it_has_a_deadline_like_everything(growing):
    made = growing.phase.preparation
    due = due_at(made, growing.policy)
    assert due in [w.until for w in waits(growing.state, growing.policy)]
    growing.wait(due - growing.at + 10.0)
    assert growing.phase.preparation is None
    assert growing.ordered(Dismiss)


def test_a_group_that_has_not_committed_a_step_prepares_nothing(ahead):
    ahead.running(2)
    ahead.nodes("abc", leaving="b", by=5.0)
    ahead.ready()
    assert not ahead.ordered(Prepare)


def test_another_controller_forgets_it_and_begins_anew(growing):
    growing(TermBegan, term=2, stored=None, ever_stored=False, again=True)
    living = tuple((w.name, w.node, 1, 3) for w in growing.facts.membership.workers)
    growing(Adopted, running=living)
    assert growing.ordered(Dismiss)
    assert growing.ordered(Dismiss)[0] == Dismiss(generation=2, number=1, workers=("w0001", "w0002", "w0003"))
    assert Dismiss(generation=0, number=0, workers=("w0001", "w0002", "w0003")) in growing.commands
    (order,) = growing.ordered(Prepare) or [c for c in growing.wait(4.0).commands if isinstance(c, Prepare)]
    assert (order.generation, order.number) == (1001, 2)


def test_a_state_with_a_preparation_is_kept_exactly(growing):
    assert decode_state(encode_state(growing.state)) == growing.state
    prepared(growing)
    assert decode_state(encode_state(growing.state)) == growing.state


def stormy(seed: int) -> Simulation:
    """Few nodes that others join, and losses of all kinds in the middle of preparations."""
    draw = random.Random(seed)

    def when() -> Moment:
        return Moment(step=draw.randint(1, 10), phase="preparing")

    kinds = (
        lambda: KillRank(when=when(), rank=draw.randrange(4)),
        lambda: KillNode(when=when(), node=draw.choice(NODES)),
        lambda: DrainNode(when=when(), node=draw.choice(NODES), notice_s=draw.choice((2.0, 40.0))),
        lambda: KillController(when=when()),
        lambda: StopRank(when=when(), rank=draw.randrange(4), seconds=draw.choice((1.0, 20.0, None))),
        lambda: BreakRank(when=when(), rank=0),
        lambda: AddNode(when=when(), node="more"),
        lambda: CutOff(when=when(), nodes=("a",), seconds=draw.choice((3.0, 15.0)), orders=True),
    )
    faults = [AddNode(when=Moment(step=draw.randint(1, 6)), node="later")]
    faults += [draw.choice(kinds)() for _ in range(draw.randint(0, 3))]
    faults += storm(seed, steps=15, nodes=NODES, ranks=4, faults=seed % 4).faults
    simulation = Simulation(
        policy=simulated_policy(
            replicas=(1, 2, None)[seed % 3], stages=seed % 5 == 0, peers=seed % 7 == 0, prepares=True
        ),
        schedule=FaultSchedule(faults=tuple(sorted(faults, key=lambda f: f.when.step)), seed=seed),
        nodes=NODES[: 2 + seed % 2],
        refold=seed % 10 == 0,
    )
    assert simulation.run().outcome in ("finished", "checkpoint"), f"seed {seed}"
    return simulation


@pytest.mark.parametrize("hundred", range(5))
def test_storms_inside_preparations_keep_every_invariant(hundred):
    runs = [stormy(seed) for seed in range(100 * hundred, 100 * hundred + 100)]
    assert sum(run.cluster.preparations.taken for run in runs) > 30
    assert sum(run.cluster.preparations.begun - run.cluster.preparations.taken for run in runs) > 30


@pytest.mark.matrix
@pytest.mark.parametrize("thousand", range(10))
def test_ten_thousand_storms_inside_preparations_keep_every_invariant(thousand):
    for seed in range(1000 * thousand, 1000 * thousand + 1000):
        stormy(seed)
