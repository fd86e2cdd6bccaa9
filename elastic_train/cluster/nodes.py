"""Query Ray about one node: its failure domain, and what its object store spilled to disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from elastic_train.cluster import ray_private
from elastic_train.cluster.actor_names import short

Info = Mapping[str, Any]
"""A node in Ray's words."""

DOMAIN_LABELS = ("ray.io/availability-zone", "rack")
"""Labels that name a failure domain, the first that a node has."""


def domain_of(info: Info) -> str:
    """A node's failure domain by its labels; itself where it has none."""
    labels: Mapping[str, str] = info.get("Labels", {})
    return next((labels[key] for key in DOMAIN_LABELS if key in labels), short(info["NodeID"]))


def node_info(name: str) -> Info | None:
    """What Ray knows of a living node."""
    return next((n for n in ray.nodes() if n["Alive"] and short(n["NodeID"]) == name), None)


def spilled_bytes(name: str) -> int:
    """What Ray moved from a node's object store to its disk so far."""
    info = node_info(name)
    if info is None:
        return 0
    return ray_private.spilled(info["NodeManagerAddress"], info["NodeManagerPort"])
