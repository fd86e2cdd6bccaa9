"""Split backward: gradients of inputs first, weight gradients later (zero-bubble schedules).

Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2. The first part runs the graph between the
stage's output and its input, and keeps at each matrix what came in there; the second part runs each of these
places alone. Both run the operations of a whole backward, and micro-batches come in the same order, so that
gradients have the same bits.

Vectors, such as scales and biases, get their gradients in the first part: they cost next to nothing, and
their operations make both gradients at once. So do tensors that are used in more than one place of the graph,
whose uses could not be told apart afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

Gradients = tuple[torch.Tensor | None, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Postponed:
    """Where gradients of matrices are left to do. The graph behind it is kept until then.

    Places of one level do not lead to each other, so they run at once: autograd looks at all of the graph
    behind a place, which takes as long as the gradient of a small matrix.
    """

    levels: list[list[tuple[Node, nn.Parameter]]]
    came: dict[Node, Gradients]

    def run(self) -> None:
        """Add the gradients to the parameters'."""
        while self.levels:
            places = self.levels.pop(0)
            given = [(node, i, g) for node, _ in places for i, g in enumerate(self.came.pop(node, ()))]
            edges = [GradientEdge(node, i) for node, i, gradient in given if gradient is not None]
            if edges:
                gradients = [gradient for _, _, gradient in given if gradient is not None]
                torch.autograd.backward(edges, gradients, inputs=[parameter for _, parameter in places])


def backward_to_input(
    output: torch.Tensor,
    gradient: torch.Tensor,
    received: torch.Tensor,
    parameters: Iterable[nn.Parameter],
) -> Postponed:
    """Run the backward of `output` as far as `received` needs it; its gradient is in `received.grad` then."""
    trained = {_accumulator(p): p for p in parameters if p.requires_grad}
    above = _above(output, _accumulator(received))
    places = _places(above, trained)
    later = {parameter for _, parameter in places}
    now = [p for p in trained.values() if p not in later]
    came: dict[Node, Gradients] = {}
    hooks = [node.register_prehook(partial(_keep, came, node)) for node, _ in places]
    try:
        torch.autograd.backward([output], [gradient], inputs=[received, *now], retain_graph=bool(places))
    finally:
        for hook in hooks:
            hook.remove()
    levels: defaultdict[int, list[tuple[Node, nn.Parameter]]] = defaultdict(list)
    for node, parameter in places:
        levels[above[node]].append((node, parameter))
    return Postponed(levels=list(levels.values()), came=came)


def _keep(came: dict[Node, Gradients], node: Node, gradients: Any) -> None:
    came[node] = gradients


def _accumulator(leaf: torch.Tensor) -> Node:
    """The end of the graph where a leaf's gradient is added up."""
    node = leaf.view_as(leaf).grad_fn
    assert node is not None
    found = node.next_functions[0][0]
    assert found is not None
    return found


def _above(output: torch.Tensor, end: Node) -> dict[Node, int]:
    """The nodes from which `end` is reached, with the length of the longest way there."""
    assert output.grad_fn is not None
    before: defaultdict[Node, list[Node]] = defaultdict(list)
    seen, waiting = {output.grad_fn}, [output.grad_fn]
    while waiting:
        node = waiting.pop()
        for following, _ in node.next_functions:
            if following is not None:
                before[following].append(node)
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
    reaching, waiting = set[Node](), list(before[end])
    while waiting:
        node = waiting.pop()
        if node not in reaching:
            reaching.add(node)
            waiting += before[node]
    left = {node: sum(n in reaching for n, _ in node.next_functions) for node in reaching}
    lengths, waiting = dict.fromkeys(reaching, 0), [node for node, count in left.items() if count == 0]
    while waiting:
        node = waiting.pop()
        for earlier in before[node]:
            if earlier in reaching:
                lengths[earlier] = max(lengths[earlier], lengths[node] + 1)
                left[earlier] -= 1
                if not left[earlier]:
                    waiting.append(earlier)
    return lengths


def _places(above: dict[Node, int], trained: dict[Node, nn.Parameter]) -> list[tuple[Node, nn.Parameter]]:
    """The nodes of the way to the input that matrices join at, each matrix with its only one."""
    joined: defaultdict[Node, list[Node]] = defaultdict(list)  # by accumulator
    for node in above:
        for following, _ in node.next_functions:
            if following is None or following in above:
                continue
            for accumulator in _leaves(following) & trained.keys():
                joined[accumulator].append(node)
    alone = {
        accumulator: nodes[0]
        for accumulator, nodes in joined.items()
        if len(nodes) == 1 and trained[accumulator].ndim > 1
    }
    by_place = {node: accumulator for accumulator, node in alone.items()}
    # A place that several matrices join at runs once, in the first part.
    shared = {node for node in by_place if list(alone.values()).count(node) > 1}
    return [
        (node, trained[accumulator])
        for node in above
        if (accumulator := by_place.get(node)) is not None and node not in shared
    ]


def _leaves(start: Node) -> set[Node]:
    """Ends of the graph behind a node."""
    seen, waiting, ends = {start}, [start], set[Node]()
    while waiting:
        node = waiting.pop()
        following = [n for n, _ in node.next_functions if n is not None]
        if not following:
            ends.add(node)
        waiting += [n for n in following if n not in seen]
        seen.update(following)
    return ends
