"""Recovery from storage where the newest checkpoint is damaged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.config import Checkpoints
from elastic_train.control.commands import End, Form, Prune
from elastic_train.control.events import (
    CheckpointRejected,
    FinalReport,
)
from elastic_train.control.states import Running
from elastic_train.recovery.evidence import FromStorage

pytestmark = pytest.mark.ring0


def reading(play):
    """A group that forms from step 10, with step 5 behind it."""
    play.running(3, step=12)
    play.parts(5)
    play.saved(5, slot=1)
    play.parts(10)
    play.saved(10, slot=2)
    play.lose("w0001")
    play.settle()
    return play.stored(5, slot=1, generation=1), play.stored(10, slot=2, generation=1)


def hold_nothing(play):
    for worker in play.phase.pending:
        play(FinalReport, generation=play.facts.lineage.generation, worker=worker, local_states=())


def test_a_damaged_checkpoint_gives_way_to_the_next_sound_one(play):
    older, newer = reading(play)
    play(CheckpointRejected, stored=newer, problem="checksum", fallback=older)
    hold_nothing(play)
    assert play.ordered(Form)[0].origin == FromStorage(stored=older)
    assert [c.stored.slot for c in play.facts.saves.commitments] == [1]
    assert play.facts.failures.count == 1  # the loss; not the damage


def test_without_a_sound_checkpoint_the_run_ends_and_never_starts_from_step_0(play):
    _, newer = reading(play)
    play(CheckpointRejected, stored=newer, problem="checksum", fallback=None)
    hold_nothing(play)
    assert play.ordered(End)[0].outcome == "checkpoint"


def test_damage_that_is_found_while_nobody_reads_is_remembered(play):
    play.running(2, step=6)
    play.parts(5)
    play.saved(5, slot=1)
    play(CheckpointRejected, stored=play.stored(5, slot=1), problem="checksum", fallback=None)
    assert isinstance(play.phase, Running)
    assert (play.facts.saves.stored, play.facts.saves.commitments) == (None, ())
    play(CheckpointRejected, stored=play.stored(5, slot=1), problem="checksum", fallback=None)
    assert play.facts.saves.stored is None


def test_the_checkpoint_that_is_being_read_is_not_pruned(play):
    play.policy = replace(play.policy, checkpoints=Checkpoints(every=5, keep=1))
    reading(play)
    play.saved(11, slot=3, generation=1)
    assert play.commands == ()  # step 11 was left behind
    play.saved(9, slot=4, generation=1)
    assert play.ordered(Prune)[0].keep == (2,)
