"""Memory of models that are no longer used, given back at once.

The modules, hooks and meshes of a model refer to each other, so what a rank had before a move stays in memory
until Python's collector comes by, many steps later perhaps: the next model would need room beside it.
"""

from __future__ import annotations

import gc


def spare_what_exists() -> None:
    """Let `reclaim` look only at what is made from now on.

    For a process that has imported what it needs and has no model yet: among all that torch makes, looking
    takes a few tenths of a second.
    """
    gc.freeze()


def reclaim() -> None:
    """Free what nothing refers to but itself."""
    gc.collect()
