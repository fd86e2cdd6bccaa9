"""Compare a stored or local state with the model by name and shape before any byte moves."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from elastic_train.errors import TensorMismatch
from elastic_train.geometry.fragments import Fragments
from elastic_train.train.state.live_fragments import DTYPE_NAMES, DTYPES, shard_like
from elastic_train.train.state.shards import Shards

Name = tuple[str, str]
Kinds = Mapping[Name, tuple[str, tuple[int, ...]]]
"""Dtype and shape by tensor and state."""
PLACED = ("param", "buffer")
"""States that the model itself has; all others are the optimizer's."""
MOST = 8
"""Problems that one message lists."""


def kinds_of(shards: Shards, states: Fragments, *, foreign: bool) -> Kinds:
    """What the other side has, under the names that this model stores its tied tensors by.

    Most other systems don't tell buffers from parameters: what is a buffer here is one there.
    """
    named = zip(states.names, states.dtypes, states.shapes, strict=True)
    buffers = {(fqn, "param") for fqn in shards.buffers} - {(fqn, "param") for fqn in shards.parameters}
    kinds: dict[Name, tuple[str, tuple[int, ...]]] = {}
    for (fqn, state), dtype, shape in named:
        name = (shards.whole.aliases.get(fqn, fqn), state)
        if foreign and name in buffers:
            kinds.setdefault((name[0], "buffer"), (dtype, tuple(shape)))
        else:
            kinds[name] = (dtype, tuple(shape))
    return kinds


def check(shards: Shards, there: Kinds, *, foreign: bool, url: str = "the state") -> frozenset[Name]:
    """TensorMismatch lists every name, dtype and shape that doesn't fit, with the names that are near.

    Each rank compares the tensors of its stage. Returns the buffers that aren't there: only another system
    may leave them out, and they keep their initial values then.
    """
    own = {(fqn, "param"): p for fqn, p in shards.parameters.items()}
    own |= {(fqn, "buffer"): b for fqn, b in shards.buffers.items()}
    given = {name for name in there if name[1] in PLACED}
    absent = {name for name, tensor in own.items() if name not in given and tensor.numel()}
    initial = frozenset(name for name in absent if foreign and name[1] == "buffer")
    problems = [
        f"{fqn} ({state}) is missing{_near(fqn, (t for t, s in given if s == state))}"
        for fqn, state in sorted(absent - initial)
    ]
    problems += [
        f"{fqn} ({state}) is not in the model{_near(fqn, shards.whole.shapes)}"
        for fqn, state in sorted(there)
        if fqn not in shards.whole.shapes
    ]
    for name in sorted(given & own.keys()):
        now = (DTYPE_NAMES[own[name].dtype], tuple(own[name].shape))
        if there[name] != now:
            was = f"{there[name][0]} {list(there[name][1])}"
            problems.append(f"{name[0]} ({name[1]}) is {was} there and {now[0]} {list(now[1])} in the model")
    if problems:
        more = f"; and {len(problems) - MOST} more" if len(problems) > MOST else ""
        remedy = "Change the model back, or map names, layouts and dtypes with a specification."
        raise TensorMismatch(url=url, problem=f"{'; '.join(problems[:MOST])}{more}. {remedy}")
    return initial


def memory_for(shards: Shards, names: Iterable[Name], kinds: Kinds) -> dict[Name, torch.Tensor]:
    """Memory for the optimizer's states of these names; those without a kind are like their parameter.

    States of other stages' parameters get none. What has a kind is given every byte later, so it has no
    values here.
    """
    found: dict[Name, torch.Tensor] = {}
    for fqn, state in names:
        if state in PLACED:
            continue
        parameter = shards.parameters.get(fqn)
        if parameter is None and fqn in shards.whole.shapes:
            continue
        if parameter is None:
            raise TensorMismatch(url=f"{fqn} {state}", problem="the model has no parameter of this name.")
        dtype, shape = kinds.get((fqn, state), (None, shards.whole.shapes[fqn]))
        found[fqn, state] = shard_like(
            parameter,
            shape,
            DTYPES[dtype] if dtype else parameter.dtype,
            shards.device,
            zeros=dtype is None,
        )
    return found


def in_own_names(document: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """A document whose tied tensors go by the names that this model stores them by."""
    kept = document["optimizer"]
    optimizer = {
        **kept,
        "groups": [
            {**group, "params": [aliases.get(fqn, fqn) for fqn in group["params"]]}
            for group in kept["groups"]
        ],
        "scalars": {aliases.get(fqn, fqn): values for fqn, values in kept["scalars"].items()},
        "states": [[aliases.get(fqn, fqn), state] for fqn, state in kept["states"]],
    }
    trainable = [aliases.get(fqn, fqn) for fqn in document["trainable"]]
    return {**document, "trainable": trainable, "optimizer": optimizer}


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, set(known), n=1)
    return f" (did you mean {near[0]}?)" if near and near[0] != name else ""
