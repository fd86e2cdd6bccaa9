"""Controllers that succeed each other on storage that shows what was, answers late, and does things twice.

What a term committed and heard of stays, what an ousted one writes is void, the journal means to its last
reader what it meant to its writers. A failure prints its seed.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import pytest

from elastic_train.errors import Fenced, LeaseHeld, StorageError
from elastic_train.storage.commit_log import CommitLog, CommitRecord
from elastic_train.storage.journal import Journal
from elastic_train.storage.journal_reading import newest_covering, parts_after
from elastic_train.storage.lease import Lease
from elastic_train.testing.lying_store import LyingStore, Truth

pytestmark = pytest.mark.ring0
LEASE_S = 10.0


@dataclass(slots=True)
class World:
    """Several candidates, one storage, one clock that all of them have (their own ones are monotonic)."""

    seed: int
    lies: float
    truth: Truth = field(default_factory=Truth)
    now: float = 0.0
    committed: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    def store(self, *, honest: bool = False) -> LyingStore:
        return LyingStore(self.truth, self.draw, lies=0.0 if honest else self.lies)


@dataclass(slots=True, eq=False)
class Controller:
    """One process: its term, and the state that its journal leads to, which here is all that was written."""

    world: World
    name: str
    term: int = 0
    over: bool = False
    said: list[str] = field(default_factory=list[str])
    wanted: CommitRecord | None = None
    store: LyingStore = field(init=False)
    lease: Lease = field(init=False)
    log: CommitLog = field(init=False)
    journal: Journal = field(init=False)

    def __post_init__(self) -> None:
        world = self.world
        self.store = world.store()

        def sleep(seconds: float) -> None:
            world.now += seconds

        self.lease = Lease(
            self.store, holder=self.name, lease_s=LEASE_S, clock=lambda: world.now, sleep=sleep
        )
        self.log = CommitLog(self.store)

    def take_over(self) -> None:
        self.lease.acquire()
        term = self.log.begin_term(self.name)
        self.journal = Journal(self.store, term, log=self.log)
        past = self.journal.begin()
        self.said = list(past.covering.said["lines"]) if past.covering is not None else []
        self.said += [record["line"] for part in past.parts for record in part.records]
        self.term = term
        self.lease.renew(term)

    def act(self) -> None:
        draw = self.world.draw
        match draw.randrange(6):
            case 0:
                self.log.check(self.term)
                self.lease.renew(self.term)
            case 1:
                if self.wanted is None:
                    step = 1 + max((r.step for r in self.log.valid()), default=0)
                    self.wanted = CommitRecord(kind="commit", path=f"c{step}.{self.term}", step=step)
                record = self.log.append(self.wanted, self.term)  # again, until it is heard of
                self.wanted = None
                assert record.slot not in self.world.committed, "a slot is one writer's"
                self.world.committed[record.slot] = (self.term, record.step)
            case 2 | 3:
                line = f"{self.name}:{len(self.said)}"
                self.said.append(line)
                self.journal.append({"line": line})
            case 4:
                self.journal.flush()
            case _:
                self.journal.keep({"lines": list(self.said)})
                self.journal.flush()


def play(seed: int, *, lies: float, acts: int = 60) -> World:
    world = World(seed=seed, lies=lies)
    living: list[Controller] = []
    for number in range(acts):
        world.now += 1.0
        if not living or world.draw.random() < 0.08:
            living.append(Controller(world, f"c{number}"))
        one = world.draw.choice(living[-3:])
        try:
            if one.term:
                one.act()
            else:
                one.take_over()
        except (Fenced, LeaseHeld):
            living.remove(one)
        except StorageError:
            pass  # said, and tried again
    world.truth.arrive(world.draw, all_of_them=True)
    last = Controller(world, "last")
    last.store.be_honest()
    world.now += 10 * LEASE_S
    last.take_over()
    for one in living:
        if one.term:
            one.store.be_honest()
            one.journal.append({"line": "late"})
            with pytest.raises(Fenced):
                one.journal.flush()
    agrees(world, last)
    return world


def agrees(world: World, last: Controller) -> None:
    """What is told to a reader from the beginning is what the last writer went on from."""
    reader = world.store(honest=True)
    records = CommitLog(reader).records()
    terms = [r.term for r in records if r.kind == "fence"]
    assert terms == sorted(set(terms)), "each term begins once, one after the other"
    kept = {r.slot: (r.term, r.step) for r in records if r.kind == "commit"}
    assert all(kept.get(slot) == said for slot, said in world.committed.items()), (
        "a commit that was heard of stays"
    )
    steps = [step for _, step in kept.values()]
    assert steps == sorted(set(steps)), "the newest record is that of the newest step"
    covering = newest_covering(reader)
    told = list(covering.said["lines"]) if covering is not None else []
    after, term = (covering.slot, covering.term) if covering is not None else (0, 0)
    told += [record["line"] for part in parts_after(reader, after, term=term) for record in part.records]
    assert told == last.said, "the journal folds to the state"
    assert "late" not in told


@pytest.mark.parametrize("lies", [0.0, 0.05, 0.3])
def test_terms_that_follow_each_other_on_storage_that_lies_agree(lies: float) -> None:
    first = int(os.environ.get("SEED", "0"))
    for seed in range(first, first + int(os.environ.get("STORMS", "40"))):
        try:
            play(seed, lies=lies)
        except AssertionError as broken:
            raise AssertionError(f"seed {seed}, lies {lies}: {broken}") from broken
        except Exception as error:
            raise RuntimeError(f"seed {seed}, lies {lies}") from error
