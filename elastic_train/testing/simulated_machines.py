"""Simulated machines: they come, leave with notice, end, and are not always seen."""

from __future__ import annotations

from collections.abc import Collection

from elastic_train.control.causes import CauseKind
from elastic_train.control.events import Event, Node, NodesChanged
from elastic_train.testing.simulated_group import FOREVER, SimulatedNode, SimulatedWorker
from elastic_train.testing.simulated_network import SimulatedNetwork
from elastic_train.testing.simulated_storage import Tell
from elastic_train.testing.simulated_time import Clock


class SimulatedMachines:
    """The nodes of a cluster and the processes on them. `tell` reaches the current controller."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.nodes: dict[str, SimulatedNode] = {}
        self.workers: dict[str, SimulatedWorker] = {}
        self.tell: Tell = lambda term, event: None
        self.blind_until = 0.0
        self.given_up: set[str] = set()  # nodes that are cut off, and were missed for too long
        self.network = SimulatedNetwork(clock)

    def kill(self, worker: SimulatedWorker, *, notice_s: float = 0.05, kind: CauseKind = "death") -> None:
        raise NotImplementedError

    def add_node(self, name: str, slots: int = 1) -> None:
        self.nodes[name] = SimulatedNode(name=name, slots=slots)
        self._nodes_changed()

    def kill_node(self, name: str) -> None:
        node = self.nodes.pop(name, None)
        if node is None:
            return
        for worker in [w for w in self.workers.values() if w.node == name]:
            self.kill(worker, notice_s=self.clock.draw.uniform(1.0, 2.0))
        self.clock.after(2.0, self._nodes_changed)

    def drain_node(self, name: str, notice_s: float) -> None:
        if name in self.nodes:
            self.nodes[name].drain_by = self.clock.now + notice_s
            self._nodes_changed()
            self.clock.after(notice_s, lambda: self.kill_node(name))

    def present(self) -> tuple[Node, ...]:
        if self.blind_until > self.clock.now:
            return ()
        return tuple(
            Node(name=n.name, slots=n.slots, drain_by=n.drain_by)
            for n in sorted(self.nodes.values(), key=lambda n: n.name)
            if n.name not in self.given_up
        )

    def cut(self, nodes: Collection[str], seconds: float, liveness_s: float, **ways: bool) -> None:
        """Cut nodes off. Those that stay dark are given up, and who comes back finds itself disowned."""
        self.network.cut(nodes, seconds, **ways)
        self.clock.after(liveness_s, lambda: self._give_up(nodes))

    def _give_up(self, nodes: Collection[str]) -> None:
        dark = {node for node in nodes if node in self.nodes and self.network.is_dark(node)} - self.given_up
        if not dark:
            return
        self.given_up |= dark
        self._nodes_changed()
        for worker in [w for w in self.workers.values() if w.node in dark]:
            self.kill(worker, kind="silence")
        left_s = max(self.network.words_wait_s(node) for node in dark)

        def back() -> None:
            self.given_up -= dark
            self._nodes_changed()

        self.clock.after(left_s, back)

    def blind(self, seconds: float) -> None:
        """The controller sees no node for a while."""
        self.blind_until = self.clock.now + seconds
        self._nodes_changed()
        self.clock.after(seconds + 0.01, self._nodes_changed)

    def _nodes_changed(self) -> None:
        self.tell(0, NodesChanged(at=0.0, nodes=self.present()))

    def say(self, worker: SimulatedWorker, event: Event) -> None:
        draw = self.clock.draw
        at = max(
            worker.said_until, worker.stopped_until if worker.stopped_until < FOREVER else 0.0, self.clock.now
        )
        worker.said_until = at = at + draw.uniform(0.005, 0.1)

        def deliver() -> None:
            wait_s = self.network.words_wait_s(worker.node)
            if wait_s and worker.died is None:
                self.clock.after(wait_s, deliver)
                return
            lost = worker.died is not None and draw.random() < 0.5
            if not lost and worker.stopped_until < FOREVER:
                self.tell(0, event)

        self.clock.after(at - self.clock.now, deliver)
        if draw.random() < 0.03:
            self.clock.after(at - self.clock.now + 1.0, deliver)
