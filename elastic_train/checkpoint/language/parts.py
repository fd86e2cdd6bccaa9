"""The parts that a specification fused or stacked, as views: so that their old names resolve too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic_train.checkpoint.language.resolve import Resolved
from elastic_train.checkpoint.language.virtual import Origin, Tile
from elastic_train.checkpoint.views import View


def views_of(resolved: Resolved) -> dict[str, View]:
    """A view for each tensor of theirs that is one part of a tensor of ours, whole and not turned."""
    ours = {tensor for tensor, _ in resolved.tensors}
    found: dict[str, View] = {}
    for (tensor, state), virtual in resolved.tensors.items():
        if state not in ("param", "buffer") or virtual.casts:
            continue
        by_source: dict[str, list[tuple[Tile, Origin]]] = {}
        for tile in virtual.tiles:
            if tile.source is not None and len(tile.source.parts) == 1:
                by_source.setdefault(tile.source.tensor, []).append((tile, tile.source))
        if len(by_source) > 1:
            made = {name: _view(tensor, virtual.shape, tiles) for name, tiles in by_source.items()}
            found |= {name: view for name, view in made.items() if view is not None and name not in ours}
    return found


def as_json(views: Mapping[str, View]) -> dict[str, dict[str, object]]:
    return {name: view.json() for name, view in views.items()}


def _view(tensor: str, shape: tuple[int, ...], tiles: Sequence[tuple[Tile, Origin]]) -> View | None:
    cut = {
        dim
        for tile, at in tiles
        for dim, size in enumerate(shape)
        if tile.box.sizes[dim] != size or at.axes[dim] is None
    }
    if len(cut) != 1:
        return None
    dim = cut.pop()
    single = tiles[0][1].axes[dim] is None
    kept = [axis for axis in tiles[0][1].axes if axis is not None]
    if any(at.axes != tiles[0][1].axes for _, at in tiles) or kept != list(range(len(kept))):
        return None
    if single and len(tiles) != 1:
        return None
    ordered = sorted(tiles, key=lambda t: 0 if single else t[1].origin[dim])
    if not single:  # the parts must be all of theirs, in its order
        at = 0
        for tile, origin in ordered:
            if origin.origin[dim] != at:
                return None
            at += tile.box.sizes[dim]
    spans = tuple((tile.box.offsets[dim], tile.box.offsets[dim] + tile.box.sizes[dim]) for tile, _ in ordered)
    return View(of=tensor, dim=dim, spans=spans, single=single)
