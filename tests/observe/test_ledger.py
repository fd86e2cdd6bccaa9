from __future__ import annotations

import pytest

from elastic_train.control.fault_schedule import KillRank, Moment
from elastic_train.observe.ledger import Ledger, ledger

pytestmark = pytest.mark.ring0


def test_an_undisturbed_run_keeps_every_step_once(recorded):
    book = ledger(recorded())
    assert [e.step for e in book.kept] == list(range(1, 16))
    assert book.superseded == ()
    assert book.losses == {step: 1 / step for step in range(1, 16)}
    assert {(e.generation, e.plan) for e in book.kept} == {(1, "dp_shard 4 on 4 nodes")}


def test_steps_that_were_run_again_stay_as_superseded_and_are_kept_once(recorded):
    book = ledger(recorded(KillRank(when=Moment(step=8), rank=1), KillRank(when=Moment(step=10), rank=0)))
    assert [e.step for e in book.kept] == list(range(1, 16))
    assert [e.step for e in book.superseded] == [6, 7, 6, 7, 8, 9]
    first, second = book.superseded[0].superseded_by, book.superseded[2].superseded_by
    assert [e.superseded_by for e in book.superseded] == [first] * 2 + [second] * 4
    assert [e.generation for e in book.kept[:5]] == [1] * 5
    assert all(e.generation >= second for e in book.kept[5:])


def test_executions_come_in_the_order_of_time(recorded):
    book = ledger(recorded(KillRank(when=Moment(step=8), rank=1)))
    walls = [e.wall for e in book.executions]
    assert walls == sorted(walls)
    assert [e.step for e in book.executions][:9] == [1, 2, 3, 4, 5, 6, 7, 6, 7]


def test_an_empty_journal_is_an_empty_ledger():
    assert ledger([]) == Ledger()
