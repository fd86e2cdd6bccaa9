"""What a pickle's calls become here: references to tensors, stubs of objects, and the functions for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes behind tensors: one entry of the file. `dtype` is None where each tensor says its own."""

    key: str
    dtype: str | None
    numel: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as a view of a storage; offset and strides in elements."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    attributes: tuple[str, ...] = field(default=(), compare=False)  # names of what else it carried


@dataclass(frozen=True, slots=True, kw_only=True)
class OddTensor:
    """A tensor that is more than a view of a storage, and what would make it one."""

    what: str
    remedy: str


@dataclass(slots=True, eq=False)
class Opaque:
    """An object of another library: what it was called with and its state, without its class."""

    kind: str = ""
    args: tuple[Any, ...] = ()
    state: Any = None

    def get(self, name: str) -> Any:
        """An attribute that was pickled, or None."""
        return self.state.get(name) if isinstance(self.state, dict) else None


@dataclass(frozen=True, slots=True)
class StorageKind:
    dtype: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A class by its name. What is made of it keeps what it was called with only where that is looked at."""

    name: str
    kept: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Builder:
    """A function of this file that stands for one that was named."""

    name: str
    build: Callable[..., Any]
