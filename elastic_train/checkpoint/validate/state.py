"""Validate the state file and its document: the types that readers rely on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from elastic_train.checkpoint.validate.manifest_rows import malformed

MOST_DEEP = 64
"""Containers inside each other in a document."""
FREE_CONTAINERS, BYTES_OF_A_CONTAINER = 1_000_000, 32
"""Lists and mappings that any JSON may have, and bytes of it for each one more."""
STEPS = 1 << 63


def check_count(data: bytes, *, url: str) -> None:
    """No more containers than can be had in the memory that a checkpoint may take, before they are made."""
    if count := too_many(data):
        raise malformed(url, f"there are {count} lists and mappings in {len(data)} bytes of JSON of it")


def too_many(data: bytes) -> int:
    """The number of lists and mappings in JSON if it has more than may be, else 0."""
    count = data.count(b"[") + data.count(b"{")
    return count if count > FREE_CONTAINERS + len(data) // BYTES_OF_A_CONTAINER else 0


def check_depth(value: Any, *, url: str) -> None:
    """No deeper than what walks a document can go."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_DEEP:
            raise malformed(url, f"its state file has more than {MOST_DEEP} containers inside each other")
        below: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                below += [*item.values(), *(k for k in item if isinstance(k, tuple))]
            elif isinstance(item, list | tuple):
                below += item
        level = below


def check_state(value: Mapping[str, Any], *, url: str) -> None:
    """The parts of a state file have the types that docs/format.md gives them."""
    aliases, views = value.get("aliases"), value.get("views", {})
    if not isinstance(value.get("document"), dict):
        raise malformed(url, "its state file has no document")
    if not isinstance(aliases, dict) or not all(_text(v) for item in aliases.items() for v in item):
        raise malformed(url, "the aliases of its state file aren't names of names")
    if not isinstance(views, dict):
        raise malformed(url, "the views of its state file aren't a mapping")
    for name, view in views.items():
        check_view(name, view, url=url)
    check_document(value["document"], url=url)


def check_view(name: Any, view: Any, *, url: str) -> None:
    """A view names a tensor, a dim and spans of it that share nothing."""
    match view:
        case {"of": str(of), "dim": dim, "spans": [*spans], "single": bool()} if (
            _text(name) and of and type(dim) is int and dim >= 0 and len(view) == 4
        ):
            if all(_span(s) for s in spans):
                inside = sorted(tuple(s) for s in spans)
                if all(a[1] <= b[0] for a, b in itertools.pairwise(inside)):
                    return
        case _:
            pass
    raise malformed(url, f"the view {name!r:.200} of its state file is no part of a tensor")


def check_document(document: Mapping[str, Any], *, url: str) -> None:
    """What readers look at in a document, where it is there."""
    step = document.get("step")
    if step is not None and not (type(step) is int and 0 <= step < STEPS):
        raise malformed(url, f"its document has the step {step!r:.80}")
    trainable = document.get("trainable")
    if trainable is not None and not _texts(trainable):
        raise malformed(url, "what its document calls trainable aren't names")
    for name in ("foreign", "metrics", "versions", "registered", "schedule", "data"):
        if not isinstance(document.get(name), dict | None):
            raise malformed(url, f"{name} of its document is no mapping")
    foreign = document.get("foreign") or {}
    if not _texts(foreign.get("not_restored", ())) or not isinstance(foreign.get("system", ""), str):
        raise malformed(url, "what its document says of the system that wrote it isn't text")
    _check_optimizer(document.get("optimizer"), url)


def _check_optimizer(optimizer: Any, url: str) -> None:
    if optimizer is None:
        return
    if not isinstance(optimizer, dict):
        raise malformed(url, "optimizer of its document is no mapping")
    groups = optimizer.get("groups", [])
    if not isinstance(groups, list | tuple) or not all(_group(g) for g in groups):
        raise malformed(url, "the groups of the optimizer in its document aren't names with settings")
    states = optimizer.get("states", [])
    if not isinstance(states, list | tuple) or not all(_texts(s) and len(s) == 2 for s in states):
        raise malformed(url, "the states of the optimizer in its document aren't pairs of names")
    for name in ("scalars", "reshard"):
        table = optimizer.get(name, {})
        if not isinstance(table, dict) or not all(isinstance(v, dict) for v in table.values()):
            raise malformed(url, f"{name} of the optimizer in its document isn't by tensor and state")
    for tensor, states_of in optimizer.get("reshard", {}).items():
        for state, words in states_of.items():
            if not isinstance(words, list | tuple) or not words or not isinstance(words[0], str):
                raise malformed(url, f"how {tensor!r:.200} ({state!r:.200}) is cut isn't said in words")


def _group(group: Any) -> bool:
    return (
        isinstance(group, dict)
        and _texts(group.get("params"))
        and isinstance(group.get("hyperparameters", {}), dict)
    )


def _texts(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(v, str) for v in values)


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and "\0" not in value


def _span(span: Any) -> bool:
    match span:
        case [start, stop]:
            return type(start) is int and type(stop) is int and 0 <= start <= stop < STEPS
        case _:
            return False
