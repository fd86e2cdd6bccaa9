"""Replicas restore together: each reads a part of the bytes from storage and broadcasts it.

So each byte leaves storage once, however many copies of the state the plan keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from elastic_train.geometry.fragments import Fragments
from elastic_train.train.state.fragment_index import FragmentIndex

ReadBoxes = Callable[[Fragments], Sequence[np.ndarray]]
"""The bytes of boxes, from wherever they are kept."""
TOGETHER_BYTES = 64 * 2**20
"""Bytes that are on their way at a time: they are in memory once more while they travel."""


def fill_together(
    index: FragmentIndex,
    boxes: Fragments,
    read: ReadBoxes,
    mesh: DeviceMesh | None,
    came: Callable[[Fragments], None] = lambda _: None,
) -> None:
    """Fill boxes that every rank of `dp_replicate` needs; all of them call it with the same boxes. `came`
    hears of those that are filled.
    """
    copies = 1 if mesh is None else mesh["dp_replicate"].size()
    own = 0 if mesh is None else mesh["dp_replicate"].get_local_rank()
    owner = owners(boxes.nbytes, copies)
    turn = turns(boxes.nbytes, owner, copies)
    for number in np.unique(turn):
        mine = boxes.take((turn == number) & (owner == own))
        arrays = read(mine) if len(mine) else ()
        index.write(mine, arrays)
        came(mine)
        for replica in range(copies if copies > 1 else 0):
            theirs = boxes.take((turn == number) & (owner == replica))
            if theirs.nbytes.sum():
                assert mesh is not None
                given = arrays if replica == own else None
                _pass_on(index, theirs, given, mesh, replica)
                if given is None:
                    came(theirs)


def _pass_on(
    index: FragmentIndex,
    boxes: Fragments,
    given: Sequence[np.ndarray] | None,
    mesh: DeviceMesh,
    replica: int,
) -> None:
    """One replica gives what it read, the others take it."""
    group = mesh["dp_replicate"].get_group()
    if given is not None:
        data = torch.from_numpy(np.concatenate([array.reshape(-1).view(np.uint8) for array in given]))
    else:
        data = torch.empty(int(boxes.nbytes.sum()), dtype=torch.uint8)
    data = data.to(mesh.device_type)
    dist.broadcast(data, src=dist.get_global_rank(group, replica), group=group)
    if given is None:
        index.write(boxes, np.split(data.cpu().numpy(), np.cumsum(boxes.nbytes)[:-1]))


def turns(sizes: np.ndarray, owner: np.ndarray, copies: int) -> np.ndarray:
    """When each box is read: all replicas read at a time, together about TOGETHER_BYTES."""
    turn = np.zeros(len(sizes), dtype=np.int64)
    for replica in range(copies):
        mine = owner == replica
        turn[mine] = np.cumsum(sizes[mine]) * copies // TOGETHER_BYTES
    return turn


def owners(sizes: np.ndarray, copies: int) -> np.ndarray:
    """Which replica reads each box: runs of neighbours of about the same bytes, as they lie in files."""
    middle = np.cumsum(sizes) - sizes / 2
    return np.minimum(middle * copies // max(int(sizes.sum()), 1), copies - 1).astype(np.int64)
