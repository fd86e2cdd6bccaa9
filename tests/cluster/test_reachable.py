"""Who accepts connections is found out side by side, and asked once for all who want to know."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

from elastic_train.cluster.controller.node_roster import Roster
from elastic_train.cluster.controller.peer_stores import PeerStores
from elastic_train.cluster.controller.probe_addresses import Verdict, reachable
from elastic_train.cluster.controller.run_context import RunContext
from elastic_train.config import Batch, RunSpec

pytestmark = pytest.mark.ring1
HOST = "127.0.0.1"
MANY = 300


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def listening(stack: ExitStack) -> tuple[str, int]:
    made = stack.enter_context(socket.create_server((HOST, 0), backlog=MANY))
    return made.getsockname()[:2]


def refusing() -> tuple[str, int]:
    """A port that nobody listens on."""
    with socket.create_server((HOST, 0)) as made:
        return made.getsockname()[:2]


def silent(stack: ExitStack) -> tuple[str, int]:
    """A port whose queue is full: the kernel answers no further connection."""
    made = stack.enter_context(socket.create_server((HOST, 0), backlog=0))
    for _ in range(3):
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(made.getsockname())
    return made.getsockname()[:2]


def test_those_that_accept_are_told_from_those_that_refuse_and_those_that_say_nothing(
    sockets: ExitStack,
) -> None:
    places = {
        "accepts": listening(sockets),
        "refuses": refusing(),
        "silent": silent(sockets),
        "no address": ("nobody.invalid.", 1),
    }
    said = {"accepts": "accepts", "refuses": "refuses", "silent": "silent", "no address": "silent"}
    assert reachable(places, 0.4) == said


def test_many_silent_ones_take_no_longer_than_one(sockets: ExitStack) -> None:
    place = silent(sockets)
    places = {f"silent {number}": place for number in range(200)} | {"accepts": listening(sockets)}
    began = time.monotonic()
    assert [name for name, said in reachable(places, 0.4).items() if said != "silent"] == ["accepts"]
    assert time.monotonic() - began < 200 * 0.4 / 2, "one after the other they would take as many deadlines"


class Cluster:
    """Nodes as Ray lists them, and how often they were listed and probed."""

    def __init__(self, nodes: int) -> None:
        self.nodes = [
            {
                "NodeID": f"{number:04d}" + "0" * 52,
                "Alive": True,
                "NodeManagerAddress": HOST,
                "NodeManagerPort": number,
                "Labels": {"rack": str(number % 7)},
            }
            for number in range(nodes)
        ]
        self.listed = self.probed = 0

    def list(self) -> list[dict[str, Any]]:
        self.listed += 1
        return self.nodes

    def reach(self, places: Mapping[str, tuple[str, int]]) -> dict[str, Verdict]:
        self.probed += len(places)
        return dict.fromkeys(places, "accepts")


class Paired:
    """A peer store's handle: what it was told."""

    def __init__(self) -> None:
        self.reported = 0
        self.pair = self

    def remote(self, buddies: list[Paired]) -> None:
        assert buddies
        self.reported += 1


@pytest.mark.parametrize("nodes", [50, 200])
def test_pairing_while_all_nodes_come_up_lists_them_once_and_tells_each_peer_store_only_news(
    nodes: int,
) -> None:
    cluster = Cluster(nodes)
    spec = RunSpec(
        name="run",
        storage_path="/nowhere",
        batch=Batch(global_size=4096, micro_size=1),
        max_steps=9,
        min_workers=1,
        max_workers=nodes,
    )
    roster = Roster(cluster.list, reach=cluster.reach, clock=lambda: 0.0)  # all within a moment
    context = RunContext(run="r", term=1, spec=spec, controller=None, environment={})
    peer_stores = PeerStores(context, roster)
    handles = {f"{number:04d}0000": Paired() for number in range(nodes)}
    for node, handle in handles.items():
        peer_stores.adopt(node, handle)
    for _ in range(nodes):  # as each of their workers comes up
        peer_stores.pair(set())
    assert cluster.listed == 1
    assert cluster.probed == nodes
    assert {handle.reported for handle in handles.values()} == {1}


def test_a_roster_that_is_a_moment_old_is_asked_for_anew() -> None:
    cluster, now = Cluster(3), [0.0]
    roster = Roster(cluster.list, reach=cluster.reach, max_age_s=0.5, clock=lambda: now[0])
    assert len(roster.living()) == len(roster.reachable()) == 3
    cluster.nodes[0]["Alive"] = False
    assert len(roster.reachable()) == 3
    now[0] = 0.6
    assert len(roster.reachable()) == 2
    assert roster.of("00000000") is None
    assert cluster.listed == 2
