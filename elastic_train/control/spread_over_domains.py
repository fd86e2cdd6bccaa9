"""Order workers so that the first of them spread over many failure domains and nodes.

Near linear in the workers: each choice touches one domain and one node.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heapreplace

from elastic_train.control.states import Worker

Node = tuple[int, bool, int, str]
"""A node with workers that wait: how many of it are taken, whether it is of no special use, the place of its
next worker by age, and its name. The least is taken from next."""


def spread(
    others: Sequence[Worker],
    chosen: Sequence[Worker],
    domains: Mapping[str, str],
    useful: Collection[str],
) -> list[Worker]:
    """The others in the order in which they are taken after those that are chosen: always one of the domain,
    then of the node, with the fewest before it; of equals one on a `useful` node, then the oldest.
    """
    taken = Counter(worker.node for worker in chosen)
    racks = Counter(domains.get(worker.node, "") for worker in chosen)
    waiting: dict[str, deque[int]] = {}
    for place, worker in enumerate(others):
        waiting.setdefault(worker.node, deque()).append(place)
    nodes: dict[str, list[Node]] = {}
    for node, places in waiting.items():
        entry = (taken[node], node not in useful, places[0], node)
        nodes.setdefault(domains.get(node, ""), []).append(entry)
    for heap in nodes.values():
        heapify(heap)
    order = [(racks[domain], *heap[0][:3], domain) for domain, heap in nodes.items()]
    heapify(order)
    found: list[Worker] = []
    while order:
        rack, _, _, _, domain = order[0]
        heap = nodes[domain]
        count, plain, _, node = heap[0]
        places = waiting[node]
        found.append(others[places.popleft()])
        if places:
            heapreplace(heap, (count + 1, plain, places[0], node))
        else:
            heappop(heap)
        if heap:
            heapreplace(order, (rack + 1, *heap[0][:3], domain))
        else:
            heappop(order)
    return found
