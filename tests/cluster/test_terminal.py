"""What the driver prints: clauses, lines, and in a terminal a live display."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from elastic_train.checkpoint.engine.machine_memory import MachineMemory
from elastic_train.cluster.driver.live_display import Display, numbers
from elastic_train.cluster.driver.run_activity import doing
from elastic_train.cluster.driver.terminal import Screen
from elastic_train.cluster.messages import Heartbeat
from elastic_train.cluster.run_updates import RunUpdate
from elastic_train.config import Batch, RunSpec
from elastic_train.control.events import StepCommitted
from elastic_train.control.fault_schedule import FailStorage, FaultSchedule, KillNode, Moment
from elastic_train.observe.journal_records import Record
from elastic_train.observe.run_summary import summary_of
from elastic_train.storage.job_output import OutputReader
from elastic_train.storage.memory_store import MemoryStore
from elastic_train.testing.simulator import Simulation, simulated_policy

pytestmark = pytest.mark.ring0
SPEC = RunSpec(
    name="gpt",
    storage_path="/runs",
    batch=Batch(global_size=8, micro_size=1),
    max_steps=15,
    min_workers=1,
    max_workers=4,
)


@pytest.fixture
def records() -> list[Record]:
    schedule = FaultSchedule(faults=(KillNode(when=Moment(step=8), node="b"),), seed=1)
    simulation = Simulation(policy=simulated_policy(), schedule=schedule, records=[])
    simulation.run()
    return simulation.records or []


def shown(records: list[Record], **settings: Any) -> None:
    screen = Screen(SPEC, OutputReader(MemoryStore()), **settings)
    for record in records:
        screen.show(RunUpdate(term=1, next=0, records=(record,), heartbeats=(), ended=None, error=None))
    screen.close()


def test_each_event_is_one_clause_and_its_reason_is_said_where_asked_for(
    records: list[Record], capsys: pytest.CaptureFixture[str]
) -> None:
    shown(records)
    short = capsys.readouterr().out
    assert "lost w0002 on node b: 4 -> 3 workers, 0 steps lost" in short
    assert "no committed step is lost" not in short
    assert all(len(line) < 110 for line in short.splitlines() if line.startswith("["))
    assert (
        short.splitlines()[-1].split()[:2] == ["worker_lost", "7"]
        or "loss of" in short
        or "death of" in short
    )
    shown(records, verbose=True)
    assert "no committed step is lost" in capsys.readouterr().out
    shown(records, quiet=True)
    assert not capsys.readouterr().out


def test_the_live_display_has_what_a_person_looks_for(records: list[Record]) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    until = next(
        n for n, r in enumerate(records) if isinstance(r.event, StepCommitted) and r.event.step == 12
    )
    told = summary_of(records[: until + 1])
    display = Display("gpt", 15, console=console)
    display.show(told)
    display.say("[05:31:09] a line above")
    display.close()
    said = out.getvalue()
    for words in (
        "step 12/15",
        "loss",
        "left",
        "goodput",
        "restarts 1",
        "in storage",
        "on 3 nodes",
        "a line above",
    ):
        assert words in said, words
    assert numbers(summary_of(()), 15) == {"restarts": "0"}


def beat(rank: int, **more: Any) -> Heartbeat:
    return Heartbeat(
        worker=f"w{rank}",
        node="a",
        pid=rank + 1,
        rank=rank,
        micro_batch=0,
        phase_s=1.0,
        memory=MachineMemory(held=1, used=1, room=2),
        **({"generation": 1, "step": 3, "phase": "forming"} | more),
    )


def test_what_is_done_instead_of_training_is_told_with_how_far_it_has_come(records: list[Record]) -> None:
    formed = next(n for n, r in enumerate(records) if r.phase == "forming")
    told = summary_of(records[: formed + 1])
    assert str(doing(summary_of(()), (beat(0),), least=2)) == "workers up: 1, needed: 2"
    assert str(doing(told, (beat(0),), least=2)) == "building the group"
    coming = (beat(0, filled_bytes=500, needed_bytes=2000), beat(1, generation=0, needed_bytes=7))
    assert str(doing(told, coming, least=2)) == "taking the state: 500B of 2000B"
    building = (beat(0, user_code=True), beat(1))
    assert (
        str(doing(told, building, least=2)) == "building the group: the job's own code runs on 1 of 2 workers"
    )
    again = next(n for n, r in enumerate(records) if r.phase == "forming" and n > formed + 9)
    later = summary_of(records[: again + 1])
    replaying = (beat(0, phase="replay"), beat(1, phase="replay", step=4))
    said = str(doing(later, replaying, least=2))
    assert said == f"replaying a lost stage: step 3, until step {later.progress.step}"
    assert later.progress.step > 4
    assert doing(summary_of(records), coming, least=2) is None
    out = io.StringIO()
    display = Display("gpt", 15, console=Console(file=out, force_terminal=True, width=100, color_system=None))
    display.show(told, doing(told, coming, least=2))
    display.close()
    assert "taking the state" in out.getvalue()
    assert "500B of 2000B, 0 s" in out.getvalue()


def test_where_the_output_is_no_terminal_a_line_says_how_far_a_recovery_has_come(
    records: list[Record], capsys: pytest.CaptureFixture[str]
) -> None:
    formed = next(n for n, r in enumerate(records) if r.phase == "forming")
    screen = Screen(SPEC, OutputReader(MemoryStore()))
    coming = (beat(0, filled_bytes=500, needed_bytes=2000),)
    update = RunUpdate(
        term=1, next=0, records=tuple(records[: formed + 1]), heartbeats=coming, ended=None, error=None
    )
    screen.show(update)
    assert "forming: taking the state: 500B of 2000B" in capsys.readouterr().out


def test_the_last_line_is_said_once(records: list[Record], capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(SPEC, OutputReader(MemoryStore()))
    screen.show(RunUpdate(term=1, next=0, records=tuple(records), heartbeats=(), ended=None, error=None))
    screen.close()
    assert capsys.readouterr().out.count("step 15/15") == 1


def test_storage_that_fails_is_said_once_and_seen_until_it_is_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    schedule = FaultSchedule(faults=(FailStorage(when=Moment(step=4), seconds=20.0),), seed=1)
    simulation = Simulation(policy=simulated_policy(every=2), schedule=schedule, records=[])
    simulation.run()
    records = simulation.records or []
    shown(records)
    said = capsys.readouterr().out
    assert said.count("] storage failed at step") == 1
    assert said.count("] storage takes checkpoints again, after") == 1
    until = next(n for n, r in enumerate(records) if r.change and r.change.kind == "storage_trouble")
    update = RunUpdate(
        term=1, next=0, records=tuple(records[: until + 1]), heartbeats=(), ended=None, error=None
    )
    Screen(SPEC, OutputReader(MemoryStore())).show(update)
    assert "storage failing for" in capsys.readouterr().out
    out = io.StringIO()
    display = Display("gpt", 15, console=Console(file=out, force_terminal=True, width=100, color_system=None))
    display.show(summary_of(records[: until + 1]))
    display.close()
    assert "storage failing for" in out.getvalue()
