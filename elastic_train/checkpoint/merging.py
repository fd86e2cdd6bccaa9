"""Merge the documents of pipeline stages into that of the whole state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

STAGE = "stage"
"""In a document, the stage of a pipeline whose first rank wrote it."""

METRICS = "metrics"
"""The entry of a share's document that goes into the commit, so that no commit overtakes its metrics."""


def merged(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One document of a whole state, from those of ranks that hold all of it between them."""
    first, optimizer = documents[0], documents[0]["optimizer"]
    order = {fqn: number for number, fqn in enumerate(first["trainable"])}
    scalars = {fqn: own for document in documents for fqn, own in document["optimizer"]["scalars"].items()}
    states = [tuple(row) for document in documents for row in document["optimizer"]["states"]]
    whole = {
        **optimizer,
        "scalars": dict(sorted(scalars.items(), key=lambda item: order.get(item[0], 0))),
        "states": [list(row) for row in sorted(dict.fromkeys(states), key=lambda row: order.get(row[0], 0))],
    }
    modules = {path: own for document in documents for path, own in document.get("modules", {}).items()}
    merged = {**{k: v for k, v in first.items() if k != STAGE}, "optimizer": whole}
    return merged | ({"modules": modules} if modules else {})
