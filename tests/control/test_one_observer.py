"""What one observer says of all machines at once is not believed until there is a second sign."""

from __future__ import annotations

import pytest

from elastic_train.control.states import Forming, Running, Settling

pytestmark = pytest.mark.ring0


@pytest.mark.parametrize("slots", [1, 2])
def test_an_empty_list_of_nodes_loses_no_worker(replicated, slots):
    play = replicated.running(4 // slots, slots=slots, step=5)
    workers = play.facts.membership.workers
    play.nodes("")
    assert isinstance(play.phase, Running)
    assert play.facts.membership.workers == workers
    assert "workers are kept until they fall silent" in play.outcome.reason
    play.step(6)
    play.nodes("abcd"[: 4 // slots], slots=slots)
    assert isinstance(play.phase, Running)
    assert (play.facts.lineage.step, play.facts.failures.ever) == (6, 0)


def test_a_list_of_strange_nodes_alone_loses_no_worker(replicated):
    play = replicated.running(4, step=5)
    play.nodes("gh")
    assert isinstance(play.phase, Running)
    assert {"a", "b", "c", "d"} <= {w.node for w in play.facts.membership.workers}


def test_who_is_still_missing_once_others_are_seen_again_is_lost(replicated):
    play = replicated.running(4, step=5)
    play.nodes("")
    play.nodes("abc")
    assert isinstance(play.phase, Settling)
    play.settle()
    assert play.facts.failures.ever == 1


def test_a_second_sign_is_believed(replicated):
    play = replicated.running(4, step=5)
    play.nodes("")
    for worker in ("w0003", "w0004"):
        play.lose(worker, "silence")
    play.nodes("ab")
    play.settle()
    assert isinstance(play.phase, Forming)
    assert play.plan.workers == ("w0001", "w0002")


def test_what_was_announced_is_believed(play):
    play.running(2, step=5)
    play.nodes("ab", leaving="ab")
    play.nodes("")
    assert not play.facts.membership.workers
    assert play.facts.failures.ever == 0


def test_some_nodes_that_are_gone_are_gone(replicated):
    play = replicated.running(4, step=5)
    play.nodes("a")
    assert [w.name for w in play.facts.membership.workers] == ["w0001"]
