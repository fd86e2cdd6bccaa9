"""Views: parts of stored tensors that have names of their own (q of a fused qkv, one of the experts).

A view is made of spans along one dim of its tensor, one after the other. It holds no bytes, and it is there
for every state of that tensor that has the same dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.account import Name
from elastic_train.checkpoint.lazy_arrays import TensorInfo
from elastic_train.errors import TensorMismatch
from elastic_train.geometry.box import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """`spans` are (start, stop) along `dim` of the tensor `of`; `single`: the dim goes, as of an expert."""

    of: str
    dim: int
    spans: tuple[tuple[int, int], ...]
    single: bool = False

    def json(self) -> dict[str, Any]:
        return {"of": self.of, "dim": self.dim, "spans": [list(s) for s in self.spans], "single": self.single}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> View:
        spans = tuple((int(a), int(b)) for a, b in value["spans"])
        return cls(of=value["of"], dim=int(value["dim"]), spans=spans, single=bool(value["single"]))

    def info(self, whole: TensorInfo) -> TensorInfo | None:
        """What the view of a tensor is; None if that has no such spans."""
        shape = list(whole.shape)
        if self.dim >= len(shape) or any(not 0 <= a <= b <= shape[self.dim] for a, b in self.spans):
            return None
        shape[self.dim] = sum(b - a for a, b in self.spans)
        if self.single and shape.pop(self.dim) != 1:
            return None
        return TensorInfo(dtype=whole.dtype, shape=tuple(shape))

    def parts(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """A box of the view as boxes of its tensor, each with its place within the box, both with `dim`."""
        low, size = list(box.offsets), list(box.sizes)
        if self.single:
            low.insert(self.dim, 0)
            size.insert(self.dim, 1)
        first, last = low[self.dim], low[self.dim] + size[self.dim]
        at = 0
        for start, stop in self.spans:
            begin, end = max(first, at), min(last, at + stop - start)
            if begin < end:
                offsets, sizes, place = list(low), list(size), [0] * len(low)
                offsets[self.dim], sizes[self.dim] = start + begin - at, end - begin
                place[self.dim] = begin - first
                yield Box(tuple(offsets), tuple(sizes)), Box(tuple(place), tuple(sizes))
            at += stop - start


def check_views(views: Mapping[str, View], tensors: Mapping[Name, TensorInfo], *, url: str) -> None:
    """Each view leads into a stored parameter or buffer and hides no tensor."""
    names = {tensor for tensor, _ in tensors}
    values = {tensor: info for (tensor, state), info in tensors.items() if state in ("param", "buffer")}
    for name, view in views.items():
        whole = values.get(view.of)
        if name in names or whole is None or view.info(whole) is None:
            raise TensorMismatch(url=url, problem=f"the view {name} of {view.of} doesn't lead into a tensor.")
