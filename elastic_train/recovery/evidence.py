"""What workers still hold after a failure, and where a new generation may start from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """The outcome of one step's vote: the all-reduced numbers that every rank applies.

    A rank that holds the reduced gradient and learns the outcome can apply the step exactly (roll forward).
    """

    step: int  # the step that this vote commits: state goes from step - 1 to step
    values: tuple[float, ...]  # in the order that train/vote.py names


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One rank's complete part of the state under the plan of `generation`, at a committed `step`.

    `reached` is step + 1 if the rank also kept the whole reduced gradient of the next step (it entered the
    vote), so that it can roll forward. `applied` is the outcome of the vote that led to `step`.
    """

    generation: int  # whose plan cut these shards
    rank: int
    step: int
    reached: int | None = None
    applied: Vote | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A committed checkpoint, as the commit log has it."""

    slot: int
    step: int
    generation: int
    term: int
    path: str  # of the checkpoint's directory, relative to the run


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh:
    """Initialise from the seed: nothing was ever committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Take the fragments that survivors hold: cut by `generation`'s plan, at `step`.

    Holders at step - 1 roll forward with `vote` first.
    """

    generation: int
    step: int
    vote: Vote | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FromStorage:
    """Read the committed checkpoint."""

    stored: Stored

    @property
    def step(self) -> int:
        return self.stored.step


Origin = Fresh | Live | FromStorage
