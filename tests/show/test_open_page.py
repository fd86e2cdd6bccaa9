"""A page that stays open in a real browser while its run goes on."""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from elastic_train.control.fault_schedule import AddNode, DrainNode, Fault, FaultSchedule, KillRank, Moment
from elastic_train.observe.journal_records import Record, wall_text
from elastic_train.observe.run_summary import RunSummary
from elastic_train.show.model import Shown
from elastic_train.testing.simulator import Simulation, simulated_policy
from tests.show.browser import BINARY, MISSING, browsing
from tests.show.test_server import serving

pytestmark = [
    pytest.mark.ring1,
    pytest.mark.matrix,
    pytest.mark.timeout(900),
    pytest.mark.skipif(BINARY is None, reason=MISSING),
]
STEPS, ROUNDS, AT_ONCE = 1680, 40, 3
SETTLED = 300
"""Looks after which a page has everything that it ever has: so much is kept of lanes and events."""


def an_hour() -> list[Record]:
    """A simulated hour: 1680 steps, in which 40 workers are lost, 40 nodes drain and 40 come."""
    faults: list[Fault] = []
    for n in range(1, ROUNDS + 1):
        faults += [
            KillRank(when=Moment(step=40 * n), rank=n % 3),
            DrainNode(when=Moment(step=40 * n + 12), node=f"n{n - 1}" if n > 1 else "c", notice_s=30.0),
            AddNode(when=Moment(step=40 * n + 25), node=f"n{n}"),
        ]
    policy = simulated_policy(replicas=2, max_steps=STEPS, every=10)
    schedule = FaultSchedule(faults=tuple(faults), seed=3)
    simulation = Simulation(policy=policy, schedule=schedule, nodes=tuple("abcd"), records=[], limit_s=7200.0)
    simulation.run()
    return [replace(r, wall=wall_text(1.7e9 + r.seconds)) for r in simulation.records or ()]


@dataclass
class Lively:
    """A run that goes on a little with every look."""

    records: Iterator[Record]
    told: RunSummary = field(default_factory=RunSummary)
    looks: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def look(self) -> Shown:
        self.looks += 1
        for record in itertools.islice(self.records, AT_ONCE):
            self.told.add(record)
        last = self.told.last
        now = None if last is None else last.seconds
        told = copy.deepcopy(self.told)
        return Shown(name="gpt", url="/runs/gpt", told=told, config={"max_steps": STEPS}, now=now)


def test_an_hour_of_events_leaves_no_more_in_the_browser_than_some_minutes(tmp_path: Path) -> None:
    records = an_hour()
    assert records[-1].seconds - records[0].seconds > 3500
    source = Lively(iter(records))

    async def watch(url: str) -> tuple[list[int], list[dict[str, int]], str]:
        heaps: list[int] = []
        counts: list[dict[str, int]] = []
        async with browsing(tmp_path / "profile") as tab:
            await tab.open(url)
            for at in (SETTLED, 2 * SETTLED, len(records) // AT_ONCE + 5):
                while source.looks < at and source.told.progress.ended is None:
                    await asyncio.sleep(0.2)
                heaps.append(await tab.heap())
                counts.append(await tab.counts())
            await asyncio.sleep(1.0)
            return heaps, counts, await tab.value("document.getElementById('s-head').innerText")

    with serving([source]) as url:
        heaps, counts, head = asyncio.run(watch(url))
    print(f"\n{source.looks} looks; heap {heaps}; {counts}")
    assert "finished" in head
    assert f"{STEPS}" in head.replace(",", "")
    assert heaps[-1] < heaps[0] + 1e6
    assert counts[-1]["documents"] == counts[0]["documents"]
    assert counts[-1]["jsEventListeners"] <= counts[0]["jsEventListeners"] + 10
    assert counts[-1]["nodes"] < 1.5 * max(counts[0]["nodes"], counts[1]["nodes"])
