"""Names of actors: one namespace, `<run>/<term>/<role>/<node or number>`; the controller's has no term.

The controller keeps its name over its restarts, so that everyone finds the one that is there.
"""

from __future__ import annotations

import hashlib

NAMESPACE = "elastic_train"


def run_key(storage_path: str, name: str) -> str:
    """One run's key on a cluster: its name and its storage, so that equal names elsewhere don't meet."""
    place = hashlib.blake2s(storage_path.encode(), digest_size=4).hexdigest()
    return f"{name}-{place}"


def controller_name(run: str) -> str:
    return f"{run}/controller"


def worker_name(run: str, term: int, worker: str) -> str:
    return f"{run}/{term}/worker/{worker}"


def peer_store_name(run: str, term: int, node: str) -> str:
    return f"{run}/{term}/peer_store/{node}"


def peer_store_of(actor_name: str, run: str) -> str | None:
    """The node whose peer store an actor name stands for, or None if it is not one of this run's peer
    stores.
    """
    return _of(actor_name, run, "peer_store")


def worker_of(actor_name: str, run: str) -> str | None:
    """The worker that an actor name stands for, or None if it is not one of this run's workers."""
    return _of(actor_name, run, "worker")


def _of(actor_name: str, run: str, role: str) -> str | None:
    parts = actor_name.removeprefix(f"{run}/").split("/")
    return parts[2] if actor_name.startswith(f"{run}/") and len(parts) == 3 and parts[1] == role else None


def short(node: str) -> str:
    """A node's name in a run: the beginning of its Ray id, enough to tell nodes apart and to be read."""
    return node[:8]
