"""`doctor`: test whether a storage path can hold runs, from this machine."""

from __future__ import annotations

import time
from collections.abc import Mapping

from elastic_train.cli.output import say, say_line
from elastic_train.observe.text_columns import columns
from elastic_train.planner.plan import bytes_text
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.preflight import free_bytes, probe
from elastic_train.storage.store import Store

SPEED_BYTES = 64 << 20
NODE_S = 60.0
"""Seconds in which a node has to answer; a process has to start there first."""
COPIES = 3
"""Checkpoints that are kept by default, and so the space that a run needs, plus the one being written."""


def examine(url: str, *, state_bytes: int, address: str | None = None) -> bool:
    """Write, read back, commit, delete and measure; StorageError says what fails. Nothing stays behind.

    With the address of a Ray cluster every node of it does so too; whether all of them can.
    """
    store = open_store(url)
    token = probe(store, needed_bytes=(COPIES + 1) * state_bytes)
    nodes: Mapping[str, str | None] = {}
    try:
        rows = [("write, read back, conditional create, stream", "works"), *_speed(store)]
        if address is not None:
            from elastic_train.cluster.driver.cluster_preflight import try_everywhere

            nodes = try_everywhere(store.url, token, address=address, within_s=NODE_S)
    finally:
        store.delete_tree("preflight")
    free = free_bytes(store)
    rows.append(("free", "unknown to this kind of store" if free is None else bytes_text(free)))
    if state_bytes:
        rows.append((f"needed for {COPIES} checkpoints and one more", bytes_text((COPIES + 1) * state_bytes)))
    rows += [(node, problem or "the same works there") for node, problem in nodes.items()]
    good = not any(nodes.values())
    say_line(f"{store.url}: {'can hold runs' if good else 'can not hold runs of this cluster'}")
    say(columns(rows))
    return good


def _speed(store: Store) -> list[tuple[str, str]]:
    """Bytes per second of one writer and one reader, with an object of SPEED_BYTES."""
    path = "preflight/speed"
    block = bytes(1 << 20)
    began = time.monotonic()
    try:
        with store.stream(path) as sink:
            for _ in range(SPEED_BYTES // len(block)):
                sink.write(block)
        written = time.monotonic()
        store.read(path)
        read = time.monotonic()
    finally:
        store.delete([path])
    return [
        ("one writer", f"{bytes_text(int(SPEED_BYTES / max(1e-9, written - began)))}/s"),
        ("one reader, just after", f"{bytes_text(int(SPEED_BYTES / max(1e-9, read - written)))}/s"),
    ]
