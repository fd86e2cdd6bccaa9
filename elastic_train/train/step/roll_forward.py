"""Bring a local state to a step: forward by the kept gradient, bit-exact, or back by an undo.

What cannot get there is `absent` afterwards and is not offered. Any local state may be rolled again later.
"""

from __future__ import annotations

from elastic_train.config import RunSpec
from elastic_train.errors import GroupBroken, UndoRefused
from elastic_train.recovery.evidence import Vote
from elastic_train.train.state.shards import Shards
from elastic_train.train.step.update import apply, finish, reopen, take_back, update
from elastic_train.train.step.vote import StepStatistics


def roll(shards: Shards, step: int, vote: Vote | None, spec: RunSpec, *, undo: bool = False) -> None:
    """`vote` is the outcome of the step where it is known. `undo` allows one.

    GroupBroken where nothing of the state can be brought there, or an undo is refused: then the state
    says of itself that it isn't undoable.
    """
    made = shards.pending.progressive
    shards.absent = shards.hidden
    if made is not None and made.finished and step == made.step - 1:
        reopen(shards)
    if shards.step == step:
        if made is not None and made.finished:
            shards.absent = frozenset(made.behind)
        elif made is not None and made.ahead:
            _leave(shards, undo)
        return
    if vote is None or vote.step != step or step != (shards.step or 0) + 1:
        raise _cannot(shards, f"the local state at step {shards.step} cannot go to step {step}")
    if made is not None and made.begun:
        _complete(shards, vote, spec)
    elif shards.pending.reached == step and any("extra" in own for own in shards.modules.values()):
        raise _cannot(shards, "get_extra_state() of its modules cannot be rolled forward")
    elif shards.pending.reached == step:
        apply(shards, vote, spec)
    else:
        raise _cannot(shards, f"the local state at step {shards.step} has no gradient of step {step}")


def _leave(shards: Shards, undo: bool) -> None:
    """Parameters are beyond the step: take them back, or leave them out."""
    made = shards.pending.progressive
    assert made is not None
    if not undo:
        shards.absent = frozenset(made.ahead)
        return
    try:
        take_back(shards)
    except UndoRefused as refused:
        raise _cannot(shards, str(refused)) from refused


def _complete(shards: Shards, vote: Vote, spec: RunSpec) -> None:
    """The rest of an interrupted step."""
    made = shards.pending.progressive
    assert made is not None
    if not StepStatistics.unpacked(vote.values).skipped:
        update(shards, sorted(name for name in made.kept if name in shards.parameters), spec)
    try:
        finish(shards, vote)
    except UndoRefused as refused:
        raise _cannot(shards, str(refused)) from refused
    shards.absent = frozenset(made.behind) if made.finished else shards.hidden


def _cannot(shards: Shards, reason: str) -> GroupBroken:
    return GroupBroken(generation=shards.generation, reason=reason)
