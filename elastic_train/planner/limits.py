"""Legal degrees of tensor, pipeline, context and expert parallelism on given nodes, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from elastic_train.axes import LAYERS, MODEL, RANKED
from elastic_train.config import Parallelism
from elastic_train.planner.hardware import Fleet
from elastic_train.planner.model_shape import ModelShape, Widths
from elastic_train.planner.plan import Infeasible, counted


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisLimits:
    """Legal values of every axis by itself, ascending, and why the next ones are not legal."""

    tp: tuple[int, ...] = (1,)
    pp: tuple[int, ...] = (1,)
    cp: tuple[int, ...] = (1,)
    ep: tuple[int, ...] = (1,)
    widths: Widths = field(default_factory=Widths)  # that axes divide together
    why: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def limits(shape: ModelShape | None, fleet: Fleet, micro_batches: int) -> AxisLimits:
    """The legal values. A model without layers, or without widths, allows 1 where they are needed."""
    if shape is None or not shape.layers:
        unknown = "the model's layers are not known"
        return AxisLimits(why=dict.fromkeys(MODEL, unknown))
    node = max(fleet.sizes, default=1)
    most = min(len(shape.layers), micro_batches, fleet.room(1)) if shape.chain else 1
    found: dict[str, tuple[int, ...]] = {}
    room = counted(fleet.room(1), "worker")
    why = {"pp": f"{len(shape.layers)} layers, {micro_batches} micro-batches and {room}"}
    if not shape.chain:
        why["pp"] = "no rules say that the model is a chain of blocks"
    if shape.widths is None:
        why |= dict.fromkeys(LAYERS, "the model has no rules for it")
    else:
        for axis, widths in _divisors(shape).items():
            every = ((name, size, cut) for name, size, cut in widths if size)
            named = {name: (size, cut) for name, size, cut in every}
            top = min([node, *(size // cut for size, cut in named.values())])
            found[axis] = tuple(
                n for n in range(1, top + 1) if not any(size % (cut * n) for size, cut in named.values())
            )
            divided = ", ".join(f"{size} {name}" for name, (size, _) in named.items())
            why[axis] = f"it divides {divided} and stays within a node of {node}" if named else ""
        if all(tensor.tp_dim is None for tensor in shape.tensors):
            found["tp"], why["tp"] = (1,), "the model has no rules for it"
        if not shape.widths.experts:
            found["ep"], why["ep"] = (1,), "the model has no experts"
    widths = shape.widths or Widths()
    if shape.sequence:
        found["cp"], why["cp"] = _contexts(shape.sequence, widths, node)
    else:
        why["cp"] = "the model has no rules for it, or its positions are not known"
    return AxisLimits(pp=tuple(range(1, max(1, most) + 1)), widths=widths, why=why, **found)


def refused(
    constraints: Parallelism, known: AxisLimits, fleet: Fleet, micro_batches: int
) -> Infeasible | None:
    """Why a person's constraints cannot be, with the nearest legal values; None where they can."""
    for axis in MODEL:
        asked, legal = getattr(constraints, axis) or 1, getattr(known, axis)
        if asked not in legal:
            values = "legal are" if len(legal) > 1 else "the legal value is"
            near = f"{values} {', '.join(str(n) for n in _near(asked, legal))}"
            why = known.why.get(axis, "")
            return Infeasible(reason=f"parallelism.{axis}={asked} is not possible: {why}; {near}")
    tp, cp, ep = (getattr(constraints, axis) or 1 for axis in ("tp", "cp", "ep"))
    problem = known.widths.heads_problem(tp, cp)
    if problem:
        legal = [str(n) for n in known.cp if not known.widths.heads_problem(tp, n)]
        asked = f"parallelism.cp={cp} is not possible with tp={tp}"
        return Infeasible(reason=f"{asked}: {problem}; legal are {', '.join(legal)}")
    if cp > 1 and ep > 1:
        asked = f"parallelism.cp={cp} is not possible with ep={ep}"
        return Infeasible(reason=f"{asked}: experts move between whole sequences; legal is cp=1 or ep=1")
    return _too_many(constraints, fleet, micro_batches)


def _too_many(constraints: Parallelism, fleet: Fleet, micro_batches: int) -> Infeasible | None:
    """Whether the fixed axes together need more ranks, or more micro-batches, than there are."""
    tp, pp, cp = (getattr(constraints, axis) or 1 for axis in ("tp", "pp", "cp"))
    replicate, shard = constraints.dp_replicate or 1, constraints.dp_shard or 1
    fixed = {a: getattr(constraints, a) for a in RANKED}
    named = " x ".join(f"{axis}={n}" for axis, n in fixed.items() if n is not None)
    dp, block = replicate * shard, tp * cp
    room = fleet.room(block)
    if pp * dp * block > room:
        legal = [f"{a} up to {room * n // (pp * dp * block)}" for a, n in fixed.items() if (n or 1) > 1]
        legal = [text for text in legal if not text.endswith(" 0")] or [f"a product up to {room}"]
        have, apart = counted(fleet.workers, "worker", ("has", "have")), f" in blocks of {block} on a node"
        return Infeasible(
            reason=f"parallelism {named} needs {pp * dp * block} ranks and {have} room for {room}"
            f"{apart if block > 1 else ''}; legal is {' or '.join(legal)}"
        )
    if dp * pp > micro_batches:
        parts = [(axis, n) for axis, n in fixed.items() if axis not in LAYERS and n]
        legal = [f"{axis} up to {micro_batches * n // (dp * pp)}" for axis, n in parts]
        return Infeasible(
            reason=f"parallelism {named} needs {dp * pp} micro-batches, {pp} for each of {dp} data-parallel "
            f"indices, and a step has {micro_batches}; legal is {' or '.join(legal)}"
        )
    ep = constraints.ep or 1
    if constraints.dp_shard and shard % ep:
        legal = [n for n in range(1, shard + 1) if shard % n == 0]
        return Infeasible(
            reason=f"parallelism.ep={ep} does not divide the {shard} ranks of dp_shard, which it is a part "
            f"of; legal are {', '.join(map(str, legal))}"
        )
    return None


def _divisors(shape: ModelShape) -> Mapping[str, tuple[tuple[str, int, int], ...]]:
    """By axis: what it divides, the size, and into how many equal pieces per rank at least."""
    widths = shape.widths
    assert widths is not None
    return {
        "tp": (
            ("key and value heads", widths.kv_heads, 1),
            ("heads", widths.heads, 1),
            ("hidden elements", widths.hidden, 1),
            ("feed-forward elements", widths.feed_forward, 1),
            ("positions", widths.sequence, 1),
        ),
        "ep": (("experts", widths.experts, 1),),
    }


def _contexts(positions: int, widths: Widths, node: int) -> tuple[tuple[int, ...], str]:
    """The legal values of cp, and why others are not."""
    legal = [n for n in range(1, node + 1) if positions % n == 0 and not widths.heads_problem(1, n)]
    divided = f"{positions} positions" + (f", {widths.heads} heads" if widths.heads else "")
    keys = f", divides or is a multiple of {widths.kv_heads} key and value heads" if widths.kv_heads else ""
    return tuple(legal), f"it divides {divided}{keys} and stays within a node of {node}"


def _near(asked: int, legal: tuple[int, ...]) -> Iterator[int]:
    """The legal values around the one that was asked, at most seven."""
    order = sorted(legal, key=lambda n: (abs(n - asked), n))[:7]
    yield from sorted(order)
