"""Look into several files, by threads where waiting for them is what takes time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from elastic_train.storage.posix_store import PosixStore
from elastic_train.storage.store import Store

THREADS = 8
FEW = 8
"""Files of this machine's file systems that one thread is through with before more have begun to help."""
Item = TypeVar("Item")
Found = TypeVar("Found")


def each(store: Store, look: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
    """`look` of each item, in their order; the first error that one raises."""
    if len(items) < 2 or (len(items) <= FEW and isinstance(store, PosixStore)):
        return [look(item) for item in items]
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(look, items))
