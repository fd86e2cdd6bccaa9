"""Take over the memory of a local state where a rank keeps a tensor as it is, in place of copying it.

Nothing moves then, no page is touched, and the first step of the next generation meets memory that is there.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from elastic_train.geometry.fragments import Fragments
from elastic_train.train.state.fragment_index import FragmentIndex
from elastic_train.train.state.live_fragments import TensorPart
from elastic_train.train.state.shards import Shards

Extra = MutableMapping[tuple[str, str], torch.Tensor]


def adopt_memory(
    shards: Shards, extra: Extra, boxes: Fragments, *, here: FragmentIndex, held: FragmentIndex
) -> np.ndarray:
    """Let new shards, whose parts are `here`, use the memory of `held` for those of `boxes` that are one
    whole part here and there.

    Returns which they are, as a mask. `extra` are states that the optimizer does not have yet. Both states
    have the same memory from here on: nobody may write before the older one is dropped. Buffers, which a
    forward may change, and views of what is larger are left to be copied.
    """
    taken, memory = np.zeros(len(boxes), bool), set[int]()
    for row in range(len(boxes)):
        name, box = boxes.names[int(boxes.key[row])], boxes.box(row)
        new, there = here.parts_of(name), held.parts_of(name)
        if name[1] == "buffer" or len(new) != 1 or len(there) != 1:
            continue
        if new[0].box != box or there[0].box != box or not _fits(new[0], there[0]):
            continue
        address = there[0].view.untyped_storage().data_ptr()
        if address not in memory:
            memory.add(address)
            _take_over(shards, extra, name, there[0].view)
            taken[row] = True
    return taken


def _fits(here: TensorPart, there: TensorPart) -> bool:
    """Whether a part may be kept in the other's memory, which holds nothing else."""
    new, old = here.view, there.view
    alike = (new.dtype, new.shape, new.device) == (old.dtype, old.shape, old.device)
    alone = old.untyped_storage().nbytes() == old.numel() * old.element_size()
    return alike and alone and here.shape == there.shape and new.stride() == old.stride()


def _take_over(shards: Shards, extra: Extra, name: tuple[str, str], memory: torch.Tensor) -> None:
    tensor = extra[name] if name in extra else shards.parameters[name[0]]
    if isinstance(tensor, DTensor):  # FSDP2 looks at it before its first forward
        tensor._local_tensor = memory
    elif name in extra:
        extra[name] = memory
    else:
        tensor.data = memory
