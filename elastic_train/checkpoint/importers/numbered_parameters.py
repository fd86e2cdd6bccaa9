"""Match optimizer states by parameter number, as in a plain `state_dict`, to parameter names.

Numbers follow the order in which the parameters were given, group by group. They are told where shapes leave
exactly one way to match them, or exactly one in the order of the model's parameters. All else is a guess.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

Shape = tuple[int, ...]
WAYS = 200_000
"""Ways to begin a match that are looked at."""
ELEMENTWISE = (
    "exp_avg", "exp_avg_sq", "momentum_buffer", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "prev",
    "exp_inf", "ax", "eta", "grad_avg", "mu", "nu", "state1", "z", "momentum", "hessian_diag",
)  # fmt: skip
"""States with an element for each of the parameter's."""
RUNNING = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of torch's own norms, which no optimizer steps."""


def shape_of(states: Mapping[str, Shape]) -> Shape | None:
    """The shape of the parameter whose states have these shapes, if they tell it."""
    for name in ELEMENTWISE:
        if name in states:
            return states[name]
    rows, columns = states.get("exp_avg_sq_row"), states.get("exp_avg_sq_col")
    return (*rows, columns[-1]) if rows and columns else None


def match(
    groups: Sequence[Sequence[int]],
    shapes: Mapping[int, Shape | None],
    parameters: Mapping[str, Shape],
    *,
    in_order: bool,
) -> Mapping[int, str] | str:
    """Number -> name, or why that can't be told. `parameters` are in the model's order where `in_order`."""
    names = [n for n in parameters if n.rpartition(".")[2] not in RUNNING]
    numbers = [n for group in groups for n in group]
    if len(set(numbers)) != len(numbers) or len(numbers) > len(names):
        return f"it steps {len(numbers)} parameters and the model has {len(names)}"
    alone = _by_shape(numbers, shapes, {n: parameters[n] for n in names})
    if alone is not None:
        return alone
    if not in_order:
        return "its states are by number, and shapes alone don't say whose they are"
    return _in_order(groups, shapes, [(n, parameters[n]) for n in names])


def _by_shape(
    numbers: Sequence[int], shapes: Mapping[int, Shape | None], parameters: Mapping[str, Shape]
) -> Mapping[int, str] | None:
    """Where every number has a shape that no other number and one parameter has."""
    by_shape: dict[Shape, list[str]] = {}
    for name, shape in parameters.items():
        by_shape.setdefault(shape, []).append(name)
    found: dict[int, str] = {}
    for number in numbers:
        shape = shapes.get(number)
        if shape is None or len(by_shape.get(shape, ())) != 1:
            return None
        found[number] = by_shape[shape][0]
    return found if len(set(found.values())) == len(numbers) else None


def _in_order(
    groups: Sequence[Sequence[int]],
    shapes: Mapping[int, Shape | None],
    parameters: Sequence[tuple[str, Shape]],
) -> Mapping[int, str] | str:
    """The one way in which each group is a part of the parameters, all in their order."""
    rest = sum(map(len, groups))
    layers: list[dict[tuple[int, ...], tuple[int, tuple[int, ...], int | None]]] = []
    level: dict[tuple[int, ...], tuple[int, tuple[int, ...], int | None]] = {
        (0,) * len(groups): (1, (), None)
    }
    total = 0
    for left, (_, shape) in zip(itertools.count(len(parameters), -1), parameters, strict=False):
        following: dict[tuple[int, ...], tuple[int, tuple[int, ...], int | None]] = {}
        for at, (ways, *_) in level.items():
            if rest - sum(at) < left:  # it may be one that no optimizer steps
                _count(following, at, ways, at, None)
            for g, group in enumerate(groups):
                if at[g] < len(group) and shapes.get(group[at[g]]) in (None, shape):
                    moved = (*at[:g], at[g] + 1, *at[g + 1 :])
                    _count(following, moved, ways, at, group[at[g]])
        total += len(following)
        if total > WAYS:
            return "there are too many ways to match its states with the parameters"
        layers.append(following)
        level = following
    end = tuple(map(len, groups))
    ways = level.get(end, (0, (), None))[0]
    if ways != 1:
        return (
            "its states don't fit the parameters in their order"
            if not ways
            else "its states fit the parameters in several ways"
        )
    found: dict[int, str] = {}
    for layer, (name, _) in zip(reversed(layers), reversed(parameters), strict=True):
        _, end, number = layer[end]
        if number is not None:
            found[number] = name
    return found


def _count(
    level: dict[tuple[int, ...], tuple[int, tuple[int, ...], int | None]],
    to: tuple[int, ...],
    ways: int,
    origin: tuple[int, ...],
    number: int | None,
) -> None:
    """One more way to get there; two are as good as any more."""
    before = level.get(to)
    level[to] = (min(2, ways + (before[0] if before else 0)), origin, number)
