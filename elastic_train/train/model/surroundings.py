"""What a job's code keeps outside of modules and tasks: in classes, global variables, closures, defaults and
attributes of functions.

It is found from the code itself: from the classes of given objects on, by the names that their functions use.
Libraries are not looked into, nor what no function names.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from elastic_train.train.model.value_prints import print_of

_LIBRARIES = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of libraries, also of an environment below or beside this one."""
_OURS = "elastic_train"
_DEPTH = 3
_APPENDS = frozenset({"append", "extend", "appendleft"})
_REFLECT = frozenset({"vars", "globals", "locals", "__dict__"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Owner:
    """Holds values by name, of which `names` are looked at, None: all that are no code."""

    label: str
    held: Any  # a dict, a class, or cells by name
    names: frozenset[str] | None = None

    def items(self) -> Iterator[tuple[str, Any]]:
        held = dict(vars(self.held)) if isinstance(self.held, type) else self.held
        return ((name, held[name]) for name in list(held) if self.watches(name))

    def watches(self, name: str) -> bool:
        held = vars(self.held) if isinstance(self.held, type) else self.held
        known = self.names is None or name in self.names
        return known and not name.startswith("__") and name in held and not _is_code(held[name])


@dataclass(slots=True, kw_only=True, eq=False)
class Surroundings:
    """Of some objects' code. `prints` tells what changed, `unread` what no code reads."""

    owners: list[_Owner] = field(default_factory=list[_Owner])
    read: set[str] = field(default_factory=set[str])  # names of globals and attributes that code reads
    reflects: bool = False  # whether code looks attributes up by names that it computes
    cells: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    sets_data: set[str] = field(default_factory=set[str])  # functions that put other data into tensors
    sets_grad: set[str] = field(default_factory=set[str])  # those that set requires_grad, but constructors
    inside: set[int] = field(default_factory=set[int])  # ids of modules that are looked at elsewhere
    _seen: set[int] = field(default_factory=set[int])
    _globals: dict[int, tuple[str, dict[str, Any], set[str]]] = field(
        default_factory=dict[int, tuple[str, dict[str, Any], set[str]]]
    )

    @classmethod
    def of(cls, roots: Iterable[Any]) -> Surroundings:
        found = cls()
        for root in roots:
            found._walk(root)
            if isinstance(root, nn.Module):
                found.inside.add(id(root))
                found._walk_attributes(root)  # hooks of torch's modules too
        found.owners += [
            _Owner(label=label, held=held, names=frozenset(names))
            for label, held, names in found._globals.values()
        ]
        return found

    def prints(self) -> dict[str, Hashable]:
        """By where it is kept."""
        found: dict[str, Hashable] = {}
        for owner in self.owners:
            for name, value in owner.items():
                if name not in self.read and not self.reflects:
                    continue
                found[f"{owner.label}.{name}"] = self._print(value)
        found |= {label: self._print(cell.cell_contents) for label, cell in self.cells if _is_full(cell)}
        return found

    def globals(self) -> Iterator[dict[str, Any]]:
        """Of the modules of the job's code."""
        return (held for _, held, _ in self._globals.values())

    def unread(self, name: str) -> bool:
        """Whether an attribute of this name is only written, or appended to, by all code there is."""
        return not self.reflects and name not in self.read

    def _print(self, value: Any) -> Hashable:
        """Of a module outside of the model, which of its tensors were written to."""
        if isinstance(value, nn.Module):
            own = () if id(value) in self.inside else (*value.parameters(), *value.buffers())
            return "module", id(value), tuple((id(tensor), tensor._version) for tensor in own)
        if type(value).__module__.split(".")[0] == _OURS:
            return "id", id(value)
        return print_of(value, content=True)

    # -- private

    def _walk(self, value: Any) -> None:
        value = _bare(value)
        if isinstance(value, functools.partial):
            for inner in (value.func, *value.args, *value.keywords.values()):
                self._walk(inner)
            return
        if id(value) in self._seen or not is_own(value):
            return
        self._seen.add(id(value))
        if isinstance(value, FunctionType):
            self._walk_function(value)
        elif isinstance(value, type):
            self._walk_class(value)
        elif not isinstance(value, ModuleType):
            for base in type(value).__mro__:
                self._walk(base)
            self._walk_attributes(value)

    def _walk_attributes(self, value: Any) -> None:
        for inner in list(getattr(value, "__dict__", {}).values()):
            if not isinstance(inner, nn.Module):
                self._walk(inner)
            if isinstance(value, nn.Module) and isinstance(inner, dict):  # its hooks, among others
                for hook in list(inner.values()):
                    if callable(hook) and not isinstance(hook, nn.Module):
                        self._walk(hook)

    def _walk_function(self, function: FunctionType) -> None:
        label = f"{function.__module__}.{function.__qualname__}"
        held = function.__globals__
        names = self._globals.setdefault(id(held), (str(held.get("__name__")), held, set()))[2]
        self._look(function.__code__, held, names)
        if _sets_data(function.__code__):
            self.sets_data.add(label)
        if function.__name__ != "__init__" and _sets_grad(function.__code__):
            self.sets_grad.add(label)
        free = function.__code__.co_freevars
        for name, cell in zip(free, function.__closure__ or (), strict=False):
            self.cells.append((f"{name!r} in {label}", cell))
            if _is_full(cell):
                self._walk(cell.cell_contents)
        defaults = {f"default {n}": v for n, v in enumerate(function.__defaults__ or ())}
        defaults |= function.__kwdefaults__ or {}
        self.read |= defaults.keys()
        self.owners.append(_Owner(label=label, held=defaults))
        self.owners.append(_Owner(label=label, held=function.__dict__))

    def _walk_class(self, cls: type) -> None:
        self.owners.append(_Owner(label=f"{cls.__module__}.{cls.__qualname__}", held=cls))
        for base in cls.__mro__:
            self._walk(base)
        for value in list(vars(cls).values()):
            if isinstance(value, property):
                for part in (value.fget, value.fset):
                    self._walk(part)
            else:
                self._walk(value)

    def _look(self, code: CodeType, held: dict[str, Any], names: set[str]) -> None:
        """The names that code uses, and which of them it reads."""
        instructions = list(dis.get_instructions(code))
        for at, one in enumerate(instructions):
            name = one.argval
            if one.opname == "LOAD_CONST" and isinstance(name, str):
                self.read.add(name)  # an attribute may be looked up by it
            if not isinstance(name, str) or one.opname.endswith(("FAST", "DEREF", "CLOSURE")):
                continue
            if name in _REFLECT and one.opname.startswith("LOAD"):
                self.reflects = True
            if name == "getattr" and not _names_a_constant(instructions[at + 1 : at + 3]):
                self.reflects = True
            if one.opname.endswith(("GLOBAL", "NAME")):
                names.add(name)
                self._used(held.get(name), code)
            following = instructions[at + 1] if at + 1 < len(instructions) else None
            appends = following is not None and following.argval in _APPENDS
            if one.opname.startswith("LOAD") and not appends:
                self.read.add(name)
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                self._look(inner, held, names)

    def _used(self, value: Any, code: CodeType) -> None:
        """What a global name stands for."""
        if not isinstance(value, ModuleType):
            self._walk(value)
            return
        if not is_own_module(value.__name__):
            return
        known = self._globals.setdefault(id(vars(value)), (value.__name__, vars(value), set()))[2]
        for name in code.co_names:
            if name in vars(value):
                known.add(name)
                self._walk(vars(value)[name])


def _sets_data(code: CodeType) -> bool:
    """Whether it assigns to `.data` of something that is not `self`."""
    instructions = list(dis.get_instructions(code))
    return any(
        one.opname == "STORE_ATTR" and one.argval == "data" and before.argval != "self"
        for before, one in itertools.pairwise(instructions)
    ) or any(isinstance(inner, CodeType) and _sets_data(inner) for inner in code.co_consts)


def _sets_grad(code: CodeType) -> bool:
    return any(
        one.argval == "requires_grad_" or (one.argval == "requires_grad" and one.opname == "STORE_ATTR")
        for one in dis.get_instructions(code)
    ) or any(isinstance(inner, CodeType) and _sets_grad(inner) for inner in code.co_consts)


def _names_a_constant(following: list[dis.Instruction]) -> bool:
    return len(following) == 2 and following[1].opname == "LOAD_CONST"


class Kept:
    """Values by name, and containers, as they are now, to be put back: what changes within tensors is not."""

    _MOST = 1 << 12

    def __init__(self, surroundings: Surroundings) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._named: list[tuple[Any, dict[str, Any], Callable[[str], bool]]] = []
        self._cells = [(cell, cell.cell_contents) for _, cell in surroundings.cells if _is_full(cell)]
        for _, value in self._cells:
            self._keep(value, _DEPTH)
        for owner in surroundings.owners:
            self.hold(owner.held, owner.watches)

    def hold(self, held: Any, watched: Callable[[str], bool]) -> None:
        """Also what a dict or a class holds by the names that are watched."""
        now = dict(vars(held)) if isinstance(held, type) else held
        own = {name: value for name, value in now.items() if watched(name)}
        self._named.append((held, own, watched))
        for value in own.values():
            self._keep(value, _DEPTH)

    def put_back(self) -> None:
        for held, own, watched in self._named:
            is_class = isinstance(held, type)
            for name in [name for name in (vars(held) if is_class else held) if watched(name)]:
                if name not in own:
                    delattr(held, name) if is_class else held.pop(name)
            for name, value in own.items():
                setattr(held, name, value) if is_class else held.__setitem__(name, value)
        for cell, value in self._cells:
            cell.cell_contents = value
        for held, copy in self._copies.values():
            held.clear()
            (held.extend if isinstance(held, list | deque) else held.update)(copy)

    def _keep(self, value: Any, depth: int) -> None:
        if isinstance(value, nn.Module | type) or not depth:
            return
        if not isinstance(value, dict | list | set | deque):
            if is_own(value) and hasattr(value, "__dict__"):
                self._keep(vars(value), depth)
            return
        if id(value) not in self._copies and len(value) <= self._MOST:
            kinds = (dict, list, set)
            plain = next((kind for kind in kinds if isinstance(value, kind)), list)
            self._copies[id(value)] = value, plain(value)  # .copy() of a class of the job's may want more
            for inner in value.values() if isinstance(value, dict) else value:
                self._keep(inner, depth - 1)


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - it raises where there is none
    except ValueError:
        return False
    return True


def _bare(value: Any) -> Any:
    """A function without what wraps it."""
    while True:
        if isinstance(value, staticmethod | classmethod | MethodType):
            value = value.__func__
        elif hasattr(value, "__wrapped__") and not isinstance(value, type | FunctionType):
            value = value.__wrapped__  # of a cache, whose values are what the function gives
        else:
            return value


def _is_code(value: Any) -> bool:
    return isinstance(value, type | ModuleType | property | staticmethod | classmethod) or callable(value)


def is_own(value: Any) -> bool:
    """Whether a class, a function or an object is of the job's own code."""
    known = value if isinstance(value, type | FunctionType | ModuleType) else type(value)
    name = known.__name__ if isinstance(known, ModuleType) else known.__module__
    return isinstance(name, str) and is_own_module(name)


@functools.cache
def is_own_module(name: str) -> bool:
    """Whether it is the job's, and no library's."""
    if name.split(".")[0] == _OURS or name in sys.builtin_module_names:
        return False
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None)
    if name == "__main__" or module is None:
        return True
    return path is not None and not path.startswith(_LIBRARIES) and _INSTALLED.isdisjoint(Path(path).parts)
