"""Evidence after a failure: state that workers still hold, and sources that a generation may start from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """The outcome of one step's vote: the all-reduced numbers that every rank applies.

    A rank that holds the reduced gradient and learns the outcome can apply the step exactly (roll forward).
    """

    step: int  # the step that this vote commits: state goes from step - 1 to step
    values: tuple[float, ...]  # in the order that train/step/vote.py names


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalState:
    """One rank's complete part of the state under the plan of `generation`, at a committed `step`.

    `reached` is step + 1 if the rank also kept the whole reduced gradient of the next step (it entered the
    vote), so that it can roll forward. `applied` is the outcome of the vote that led to `step`.

    Where updates run inside backward, an update may have been interrupted between parameters. Then every one
    is named: those in `ahead` are at step + 1 already, those in `kept` at `step` with their reduced gradient,
    those in `behind` at `step` without; `passed` is the outcome for step + 1, or what of it was agreed on
    before the first update. `undoable` says that the
    gradient of the newest update is still kept and that the optimizer's rules can run it backwards.
    """

    generation: int  # whose plan cut these shards
    rank: int
    step: int
    reached: int | None = None
    applied: Vote | None = None
    ahead: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    passed: Vote | None = None
    undoable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSnapshot:
    """A part of the state in peer memory: what `rank` held at `step` under the plan of `generation`.

    Whole and verified, or the `share` (i of n) of it that this copy has. `peer_store` serves it.
    """

    peer_store: str
    generation: int
    rank: int
    step: int
    share: tuple[int, int] = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """Steps of a pipeline stage that can be replayed, `first` to `last`, without a gap.

    Everything that crossed its boundaries is kept by the senders, and so is every vote's outcome. `senders`
    are the workers that keep it. Of a group of `width` stages only what crosses its ends is kept: they are
    replayed as one.
    """

    generation: int
    stage: int  # pp index, of the first
    width: int = 1
    first: int
    last: int
    senders: tuple[str, ...] = ()

    @property
    def stages(self) -> tuple[int, int]:
        return self.stage, self.stage + self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A committed checkpoint, as the commit log has it."""

    slot: int
    step: int
    generation: int
    term: int
    path: str  # of the checkpoint's directory, relative to the run


@dataclass(frozen=True, slots=True, kw_only=True)
class Commitment:
    """A committed checkpoint, with the metrics it was committed with."""

    stored: Stored
    metrics: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh:
    """Initialise from the seed: nothing was ever committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Take the fragments that survivors hold: cut by `generation`'s plan, at `step`.

    Holders at step - 1 roll forward with `vote` first; with `undo` those at step + 1 go back.
    """

    generation: int
    step: int
    vote: Vote | None = None
    undo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FromStorage:
    """Read the committed checkpoint."""

    stored: Stored

    @property
    def step(self) -> int:
        return self.stored.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Run a lost stage's micro-batches of the steps after `base` again, from the log of its boundary.

    Its state at `base` comes from peer memory or, where `peers` is empty, from the checkpoint `stored`; where
    there is neither, `base` is 0 and it is initialised from the seed. `lost` are the parts that nobody has,
    as (stage, place in it without replicas). `exact`: it has to be equal to the bit to others of its stage.
    """

    log: Logged
    base: int
    lost: tuple[tuple[int, int], ...] = ()
    exact: bool = False
    peers: tuple[PeerSnapshot, ...] = ()
    stored: Stored | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """Take each part of the state from where it is left, all at `step` under `generation`'s plan.

    Survivors as in Live, then `peers`, then `stored`, a checkpoint of just this step, and `replays` of whole
    stages. What survivors hold is taken from them.
    """

    generation: int
    step: int
    vote: Vote | None = None
    undo: bool = False
    peers: tuple[PeerSnapshot, ...] = ()
    stored: Stored | None = None
    replays: tuple[Replay, ...] = ()


Origin = Fresh | Live | FromStorage | Mixed


def checkpoint_of(origin: Origin) -> Stored | None:
    """The checkpoint of which an origin reads at least a part. It is the same one wherever it is named."""
    match origin:
        case FromStorage(stored=stored):
            return stored
        case Mixed(stored=stored, replays=replays):
            return next((found for found in (stored, *(r.stored for r in replays)) if found), None)
        case Fresh() | Live():
            return None
