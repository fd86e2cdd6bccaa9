"""The resolved map as text: where each tensor comes from and by which rule."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_train.checkpoint.language.resolve import Resolved
from elastic_train.checkpoint.language.virtual import Tile, Virtual, source_box
from elastic_train.checkpoint.piece import span


def describe(resolved: Resolved) -> str:
    """One paragraph per tensor, sorted by name."""
    lines: list[str] = []
    for name in sorted(resolved.tensors):
        lines += _lines(name[0], name[1], resolved.tensors[name], resolved.rules[name])
    lines += [f"{alias} is {target}" for alias, target in sorted(resolved.aliases.items())]
    lines += [f"{tensor} ({state}) is of no use" for tensor, state in sorted(resolved.left)]
    return "\n".join(lines)


def _lines(tensor: str, state: str, virtual: Virtual, rule: str) -> Iterator[str]:
    casts = "".join(f", read as {name}" for name in virtual.casts)
    head = f"{tensor} ({state}): {virtual.stored} {list(virtual.shape)}{casts}, by {rule}"
    if len(virtual.tiles) == 1:
        yield f"{head} = {_source(virtual.tiles[0])}"
        return
    yield head
    for tile in virtual.tiles:
        yield f"  {span(tile.box)} = {_source(tile)}"


def _source(tile: Tile) -> str:
    at = tile.source
    if at is None:
        return "zeros"
    text = f"{at.tensor} ({at.state}){span(source_box(at, tile.box, tile.box))}"
    order = [axis for axis in at.axes if axis is not None]
    if order != sorted(order):
        text += f" with dims {order}"
    first, *others = at.parts
    if others:
        return f"mean of {text} in parts {', '.join(map(str, at.parts))}"
    return f"{text} of part {first}" if first else text
