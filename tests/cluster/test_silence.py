"""One observer's word buries nobody: silence and missing nodes are confirmed by a second sign."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from elastic_train.checkpoint.engine.machine_memory import MachineMemory
from elastic_train.cluster.controller.liveness_watch import NodeWatch, WorkerWatch
from elastic_train.cluster.controller.node_roster import Roster
from elastic_train.cluster.controller.probe_addresses import Verdict
from elastic_train.cluster.messages import Heartbeat, Writing
from elastic_train.cluster.process_witness import sight
from elastic_train.config import Batch, RunSpec, Timing
from elastic_train.control.events import Cause, Event, NodesChanged, WorkerLost

pytestmark = pytest.mark.ring1
TIMING = Timing(heartbeat_s=1.0, liveness_s=8.0, settle_s=30.0, progress_s=600.0)
SPEC = RunSpec(
    name="run",
    storage_path="/nowhere",
    batch=Batch(global_size=4, micro_size=1),
    max_steps=9,
    min_workers=1,
    max_workers=3,
    timing=TIMING,
)
NODES = ("a", "b", "c")


class Life:
    """An actor whose process lives: its pending call stays pending."""

    def __init__(self) -> None:
        self.life = self

    def remote(self) -> object:
        return object()


class World:
    """Three nodes with a worker each, as a controller sees them; time passes by `pass_`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.listed_by_ray = set(NODES)
        self.accepting = set(NODES)
        self.refusing: set[str] = set()  # their machine says that nobody listens
        self.speaking = set(NODES)
        self.said: list[Event] = []
        self.workers = WorkerWatch(SPEC, self.said.append, lambda: self.now)
        roster = Roster(self.list, reach=self.reach, max_age_s=0.0, clock=lambda: self.now)
        self.nodes = NodeWatch(SPEC, roster, self.said.append, lambda: self.now, self.workers.nodes_heard)
        for number, node in enumerate(NODES):
            self.workers.add(f"w{node}", Life())
            self.workers.heard(f"w{node}", heartbeat(node, number))

    def list(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": node,
                "Alive": True,
                "NodeManagerAddress": "h",
                "NodeManagerPort": 1,
                "Resources": {"CPU": 1.0},
                "Labels": {},
            }
            for node in sorted(self.listed_by_ray)
        ]

    def reach(self, places: Mapping[str, tuple[str, int]]) -> dict[str, Verdict]:
        return {
            node: "accepts" if node in self.accepting else "refuses" if node in self.refusing else "silent"
            for node in places
        }

    def pass_(self, seconds: float, step_s: float = 0.5) -> None:
        for _ in range(round(seconds / step_s)):
            self.now += step_s
            for number, node in enumerate(NODES):
                if node in self.speaking:
                    self.workers.heard(f"w{node}", heartbeat(node, number))
            self.nodes.look({})

    def listed(self) -> set[str]:
        changed = [event for event in self.said if isinstance(event, NodesChanged)]
        return {node.name for node in changed[-1].nodes}

    def lost(self) -> set[str]:
        return {event.worker for event in self.said if isinstance(event, WorkerLost)}


def heartbeat(node: str, rank: int) -> Heartbeat:
    return Heartbeat(
        worker=f"w{node}",
        node=node,
        pid=rank + 1,
        generation=1,
        rank=rank,
        step=3,
        phase="forward",
        micro_batch=0,
        phase_s=1.0,
        memory=MachineMemory(held=1, used=1, room=2),
    )


@pytest.mark.parametrize("missing", [set(NODES), {"a"}, {"a", "b"}], ids=["all", "one", "two"])
@pytest.mark.parametrize("sign", ["speaks", "accepts"])
def test_nodes_that_are_not_listed_are_there_while_another_sign_says_so(missing: set[str], sign: str) -> None:
    world = World()
    world.pass_(2.0)
    world.listed_by_ray -= missing
    if sign == "speaks":
        world.accepting -= missing
    else:
        world.speaking -= missing
    world.pass_(100.0)
    world.listed_by_ray |= missing
    world.accepting |= missing
    world.pass_(2.0)
    assert [event for event in world.said if isinstance(event, NodesChanged)] == world.said[:1]
    assert world.listed() == set(NODES)


def test_a_node_that_refuses_is_gone_at_once() -> None:
    world = World()
    world.pass_(2.0)
    world.accepting.discard("b")
    world.refusing.add("b")
    world.pass_(0.5)
    assert world.listed() == {"a", "c"}


def test_a_node_that_says_nothing_is_gone_when_its_workers_are_silent_too() -> None:
    world = World()
    world.pass_(2.0)
    world.accepting.discard("b")
    world.pass_(1.0)
    assert world.listed() == set(NODES), "its workers speak"
    world.speaking.discard("b")
    world.pass_(1.5)
    assert world.listed() == {"a", "c"}


def test_a_node_without_workers_is_gone_when_it_is_missing_twice() -> None:
    world = World()
    world.listed_by_ray.add("spare")
    world.accepting.add("spare")
    world.pass_(1.0)
    world.accepting.discard("spare")
    world.pass_(0.5)
    assert "spare" in world.listed(), "one look is one observer's word"
    world.pass_(0.5)
    assert "spare" not in world.listed()


def test_whoever_sees_nobody_doubts_itself_first_and_not_for_ever() -> None:
    world = World()
    world.pass_(2.0)
    world.accepting.clear()
    world.speaking.clear()
    world.pass_(20.0)
    assert world.listed() == set(NODES), "cut off from all, or all of them are gone: nothing tells yet"
    suspects = world.workers.suspects()
    assert set(suspects) == {"wa", "wb", "wc"}
    world.workers.judge(suspects, world.workers.within_patience(suspects))
    assert not world.lost()
    world.pass_(15.0)
    assert world.listed() == set()
    suspects = world.workers.suspects()
    world.workers.judge(suspects, world.workers.within_patience(suspects))
    assert world.lost() == {"wa", "wb", "wc"}


def test_all_nodes_of_a_run_that_refuse_are_gone_at_once() -> None:
    world = World()
    world.pass_(2.0)
    world.refusing |= world.accepting
    world.accepting.clear()
    world.pass_(0.5)
    assert world.listed() == set()


def test_a_silent_worker_whose_process_lives_is_slow_until_nothing_moves_for_long() -> None:
    world = World()
    world.pass_(2.0)
    world.speaking.discard("b")
    world.pass_(8.5)
    suspects = world.workers.suspects()
    assert suspects == {"wb": ("b", 2)}
    assert world.workers.suspects() == {}, "it is looked at once in a while"
    world.workers.judge(suspects, {"wb"})
    assert not world.lost()
    reported = {s.worker: s.phase_s for s in world.workers.heartbeats()}
    assert reported["wb"] > 8.0, "what it says nothing about lasts on, for whoever looks for hangs"
    assert reported["wa"] == 1.0
    world.pass_(8.5)
    assert set(world.workers.suspects()) == {"wb"}, "its silence goes on: it is looked at again"
    world.workers.judge({"wb"}, set())
    assert world.lost() == {"wb"}


def test_nobody_lives_in_silence_for_ever() -> None:
    world = World()
    world.speaking.clear()
    world.pass_(TIMING.progress_s + 1.0)
    world.workers.judge({"wa"}, {"wa"})
    assert world.lost() == {"wa"}


def test_an_actor_that_ray_cannot_reach_is_looked_at_before_it_is_lost() -> None:
    world = World()
    world.pass_(2.0)
    unavailable = Cause(kind="death", detail="wb: the connection was lost")
    world.workers.doubt("wb", unavailable)
    assert world.workers.suspects() == {"wb": ("b", 2)}, "at once"
    world.workers.judge({"wb"}, {"wb"})
    assert not world.lost()
    assert world.workers.suspects() == {}
    world.workers.doubt("wb", unavailable)
    world.workers.judge(world.workers.suspects(), set())
    assert world.said[-1] == WorkerLost(at=0.0, worker="wb", cause=unavailable)


def test_one_that_speaks_before_the_verdict_is_not_lost() -> None:
    world = World()
    world.speaking.discard("a")
    world.pass_(9.0)
    suspects = world.workers.suspects()
    world.workers.heard("wa", replace(heartbeat("a", 0), step=4))
    world.workers.judge(suspects, set())
    assert not world.lost()


def test_bytes_that_storage_takes_are_a_sign_of_the_generation_whose_they_are() -> None:
    world = World()
    world.workers.wrote("a", Writing(generation=3, seconds=2.0))
    world.workers.heard("wb", replace(heartbeat("b", 1), writing=Writing(generation=3, seconds=0.5)))
    world.workers.wrote("c", Writing(generation=4, seconds=0.0))
    world.now += 1.0
    assert world.workers.written_s(3) == 1.5
    assert world.workers.written_s(5) is None
    world.workers.heard("wb", heartbeat("b", 1))
    assert world.workers.written_s(3) == 3.0
    world.workers.wrote("a", None)
    assert world.workers.written_s(3) is None


# -- what the kernel says of real processes

HOLDS_THE_GIL = "import ctypes; print('there', flush=True); ctypes.PyDLL(None).sleep(600)"
COMPUTES = "print('there', flush=True)\nwhile True: pass"
TITLE = sys.executable.encode()


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    made = subprocess.Popen([sys.executable, "-c", request.param], stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None
    assert made.stdout.readline() == "there\n"
    yield made
    made.kill()
    made.wait()
    made.stdout.close()


@pytest.mark.parametrize("process", [HOLDS_THE_GIL, COMPUTES], indirect=True)
def test_a_process_that_cannot_speak_is_seen_to_live(process: subprocess.Popen[str]) -> None:
    assert sight(process.pid, title=TITLE).alive


@pytest.mark.parametrize("process", [HOLDS_THE_GIL], indirect=True)
def test_a_stopped_a_dead_and_another_process_are_not(process: subprocess.Popen[str]) -> None:
    assert not sight(process.pid, title=b"ray::").alive, "its id is another's by now"
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert not sight(process.pid, title=TITLE).alive
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not sight(process.pid, title=TITLE).alive, "a zombie"
    process.wait()
    assert not sight(process.pid, title=TITLE).alive
