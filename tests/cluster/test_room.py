"""Who is found to hold the room that a worker waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from elastic_train.cluster.controller.node_roster import Roster
from elastic_train.cluster.controller.room_watch import Holder, RoomWatch, holders, text_of
from elastic_train.cluster.ray_private import LivingActor, RunningTask
from elastic_train.config import Batch, RunSpec
from elastic_train.control.events import Event, LacksRoom

pytestmark = pytest.mark.ring0
NODE = "a" * 56


def actor(name: str, *, node: str = NODE, has_process: bool = True, **resources: float) -> LivingActor:
    return LivingActor(
        id=name, name=name, kind="WorkerActor", node=node, has_process=has_process, resources=resources
    )


def holder(name: str, **resources: float) -> Holder:
    return Holder(name=name, resources=resources)


def test_holders_are_those_of_what_is_lacking_alone() -> None:
    there = [holder("cpus", CPU=3.0), holder("gpu", GPU=1.0), holder("nothing")]
    total = {"CPU": 4.0, "GPU": 1.0}
    assert holders({"CPU": 1.0}, total, there) == []
    assert [a.name for a in holders({"CPU": 2.0}, total, there)] == ["cpus"]
    assert [a.name for a in holders({"CPU": 1.0, "GPU": 1.0}, total, there)] == ["gpu"]


def test_many_holders_are_counted() -> None:
    assert text_of([holder(name, CPU=1.0) for name in "vwxyz"]) == "v, w, x and 2 more hold it"
    assert text_of([holder("x", CPU=1.0)]) == "x holds it"


class Handle:
    def __init__(self, name: str) -> None:
        self._actor_id = self
        self._name = name

    def hex(self) -> str:
        return self._name


def watch(
    coming: dict[str, tuple[str, Any]],
    actors: list[LivingActor],
    posted: list[Event],
    tasks: Sequence[RunningTask] = (),
) -> RoomWatch:
    spec = RunSpec(
        name="r",
        storage_path="/tmp/r",
        batch=Batch(global_size=4, micro_size=1),
        max_steps=1,
        min_workers=1,
        max_workers=2,
    )
    place = {"NodeManagerAddress": "10.0.0.7", "NodeManagerPort": 7}
    info = {"NodeID": NODE, "Alive": True, "Resources": {"CPU": 1.0}, **place}

    def tasks_at(address: str, port: int) -> Sequence[RunningTask]:
        assert (address, port) == tuple(place.values())
        return tasks

    return RoomWatch(
        spec,
        Roster(lambda: [info]),
        lambda: coming,
        posted.append,
        actors=lambda: actors,
        tasks=tasks_at,
    )


def test_a_worker_that_waits_for_room_is_told_once_at_the_second_look() -> None:
    posted: list[Event] = []
    other = [actor("r2/1/worker/w0001", CPU=1.0), actor("w2", has_process=False, CPU=1.0)]
    room = watch({"w0002": (NODE[:8], Handle("w2"))}, other, posted)
    room.look()
    assert posted == [], "it has only been started"
    room.look()
    room.look()
    assert posted == [LacksRoom(at=0.0, worker="w0002", holders="r2/1/worker/w0001 holds it")]


def test_tasks_that_are_no_actors_hold_room_too() -> None:
    posted: list[Event] = []
    own = actor("w2", has_process=False, CPU=1.0)
    held = [RunningTask(pid=41, resources={"CPU": 1.0})]
    room = watch({"w0002": (NODE[:8], Handle("w2"))}, [own], posted, held)
    room.look()
    room.look()
    assert posted == [LacksRoom(at=0.0, worker="w0002", holders="a task in process 41 holds it")]


@pytest.mark.parametrize(
    "there",
    [
        [actor("w2", has_process=True, CPU=1.0)],  # its own process is slow to start
        [actor("other", node="b" * 56, CPU=1.0), actor("w2", has_process=False, CPU=1.0)],
        [actor("none", CPU=0.0), actor("w2", has_process=False, CPU=1.0)],
    ],
)
def test_a_worker_that_has_its_room_is_merely_slow(there: list[LivingActor]) -> None:
    posted: list[Event] = []
    room = watch({"w0002": (NODE[:8], Handle("w2"))}, there, posted)
    for _ in range(3):
        room.look()
    assert posted == []
