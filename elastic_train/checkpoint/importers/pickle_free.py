"""Read the structure of a pickled file without running it: inert stubs stand for everything it names.

A pickle is a program that calls what it names. Here a name is looked up in closed lists, and what is called
builds a value of this room. Names of torch and of Python's own library that aren't on a list refuse the file.
Names of other packages are words: what they are called with is dropped, and nothing is imported.
"""

from __future__ import annotations

import _compat_pickle
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.importers.pickle_bounds import check_bounds
from elastic_train.checkpoint.importers.pickle_builders import KNOWN, MOST, odd
from elastic_train.checkpoint.importers.pickle_machine import Machine
from elastic_train.checkpoint.importers.pickle_names import (
    DICTIONARIES,
    DTYPES,
    KEPT,
    ODD,
    STORAGES,
    WORDS_OF_PYTHON,
    WORDS_OF_TORCH,
)
from elastic_train.checkpoint.importers.pickle_values import (
    Builder,
    Kind,
    OddTensor,
    Opaque,
    Storage,
    StorageKind,
    TensorRef,
)
from elastic_train.errors import FormatUnsupported

__all__ = ["OddTensor", "Opaque", "TensorRef", "unpickle"]

PYTHON = sys.stdlib_module_names | {name.partition(".")[0] for name in _compat_pickle.IMPORT_MAPPING}
"""The modules of Python's own library, under the names of Python 2 too, which old protocols use."""


def unpickle(data: bytes, *, url: str) -> Any:
    """The structure of a pickle: containers, numbers, text, `TensorRef` and `Opaque`.

    FormatUnsupported names what isn't on the lists; ChecksumMismatch where the bytes are no pickle.
    """
    value = Machine(data, _Torch(url), url=url).load()
    check_bounds(value, _inside, length=len(data), url=url)
    return value


def _inside(value: object) -> Iterable[Any] | None:
    return (value.args, value.state) if isinstance(value, Opaque) else None


@dataclass(frozen=True, slots=True)
class _Torch:
    """What names, calls and references mean in files of torch."""

    url: str

    def named(self, module: str, name: str) -> object:
        found = KNOWN.get((module, name))
        if found is not None:
            return found
        package, place = module.partition(".")[0], f"{module}.{name}"
        if module in ("torch", "torch.storage") and name in STORAGES:
            return StorageKind(STORAGES[name])
        if module == "torch" and name in DTYPES:
            return name
        if name in DICTIONARIES and package in DICTIONARIES[name]:
            return KNOWN["builtins", "dict"]
        if (module, name) in ODD:
            return Builder(place, odd(*ODD[module, name]))
        if package == "torch":
            allowed = place.startswith(WORDS_OF_TORCH)
        elif package in PYTHON or package.startswith("_") or not package.isidentifier():
            allowed = package in WORDS_OF_PYTHON or place in WORDS_OF_PYTHON
        else:
            allowed = True
        if not allowed and package != "__main__":
            raise FormatUnsupported(
                url=self.url,
                problem=f"it names {place:.200}, which is not on the list of what may be read, and was not "
                "run. If you trust the file, load it with the system that wrote it and save plain tensors "
                "and numbers.",
            )
        return Kind(place, kept=place.startswith(KEPT))

    def call(self, function: object, arguments: tuple[Any, ...]) -> object:
        if isinstance(function, Builder):
            return function.build(*arguments)
        if isinstance(function, Kind):
            return Opaque(function.name, arguments if function.kept else ())
        raise ValueError(f"a call of a {type(function).__name__}")

    def fill(self, value: object, state: object) -> None:
        if isinstance(value, Opaque):
            if value.kind.startswith(KEPT):
                value.state = state
        elif isinstance(value, dict) and isinstance(state, dict):
            if strange := [name for name in state if name != "_metadata"]:
                raise FormatUnsupported(
                    url=self.url,
                    problem=f"a dictionary in it has attributes ({strange[0]!r:.80}), which can't be read. "
                    "Save a plain one.",
                )
        else:
            raise ValueError(f"a state for a {type(value).__name__}")

    def add(self, value: object, items: list[Any]) -> None:
        if not isinstance(value, Opaque):
            raise ValueError(f"items for a {type(value).__name__}")

    def reference(self, pid: object) -> Storage:
        match pid:
            case ("storage", StorageKind() as kind, str() as key, _, int() as numel) if 0 <= numel < MOST:
                return Storage(key, kind.dtype, numel)
            case _:
                raise ValueError("a reference to something other than a storage")
