"""Groups that stand still in a simulation, and the watch over their members' marks that finds out."""

from __future__ import annotations

from collections.abc import Callable, Collection

from elastic_train.control.events import Cause, Hung
from elastic_train.testing.simulated_cluster import SimulatedCluster
from elastic_train.testing.simulated_group import SimulatedGroup, SimulatedWorker


def hang(cluster: SimulatedCluster, worker: SimulatedWorker) -> None:
    """Hold a rank still where it is, for good. After a while it is named."""
    worker.hung = True
    _named(cluster, worker.name, lambda group: True)


def stand_apart(cluster: SimulatedCluster, nodes: Collection[str], seconds: float) -> None:
    """Nodes do not reach the others: their group stands still, and nobody stands out."""
    cluster.network.cut(nodes, seconds, peers=True)
    _named(cluster, "", lambda group: bool(cluster.network.peers_wait_s({w.node for w in group.workers})))


def _named(cluster: SimulatedCluster, worker: str, stands: Callable[[SimulatedGroup], bool]) -> None:
    group = cluster.group
    cause = Cause(kind="hang", detail=f"{worker} hangs", step=group.step + 1 if group else 0)

    def name() -> None:
        if group is None or cluster.group is not group or not group.training or group.broken:
            return
        if stands(group):
            hung = Hung(at=0.0, generation=group.generation, worker=worker, cause=cause)
            cluster.tell(cluster.term, hung)

    cluster.clock.after(cluster.policy.timing.progress_s / 2, name)
