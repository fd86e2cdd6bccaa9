"""A piece: the bytes of one box of a logical tensor, on their way into a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastic_train.checkpoint.dtypes import element
from elastic_train.errors import TensorMismatch
from elastic_train.geometry.box import Box


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """`data` holds the box's elements in row-major order, as an array of any item type or as plain bytes.

    Only its bytes count, so a bfloat16 tensor may come as an int16 view. An array that isn't contiguous is
    copied when it is written. `logical` names a declared part of the tensor (q of a fused qkv) that the box
    lies in.
    """

    tensor: str
    state: str
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    data: npt.NDArray[np.generic] | np.generic | memoryview | bytes
    logical: str | None = None

    def __post_init__(self) -> None:
        size = element(self.dtype, url=self.name).bytes * self.box.numel
        if self.data_bytes != size:
            raise TensorMismatch(
                url=self.name, problem=f"{self.data_bytes} bytes given for a box of {size} bytes."
            )
        inside = len(self.box.sizes) == len(self.shape) and all(
            o >= 0 and o + s <= n
            for o, s, n in zip(self.box.offsets, self.box.sizes, self.shape, strict=True)
        )
        if not inside:
            raise TensorMismatch(url=self.name, problem=f"the box isn't inside the shape {self.shape}.")

    @property
    def name(self) -> str:
        """`tensor:state`, with the box unless it is the whole tensor."""
        return f"{self.tensor}:{self.state}" + ("" if self.box == Box.whole(self.shape) else span(self.box))

    @property
    def data_bytes(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else self.data.nbytes

    def bytes(self) -> memoryview:
        """The box's bytes, without a copy where they are contiguous."""
        if isinstance(self.data, np.ndarray | np.generic):  # indexing with () makes a scalar of a 0-dim array
            return np.ascontiguousarray(self.data).reshape(-1).view(np.uint8).data
        view = memoryview(self.data)
        return view.cast("B") if view.nbytes else memoryview(b"")


def span(box: Box) -> str:
    """The box as text, as it is written in names and messages."""
    return "[" + ",".join(f"{o}:{o + s}" for o, s in zip(box.offsets, box.sizes, strict=True)) + "]"
