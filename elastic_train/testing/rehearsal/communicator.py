"""Collectives of the rehearsal device: NCCL's manners, with gloo below.

Asynchronous and ordered on streams; where a peer is gone they hang until they are aborted, from any thread;
once aborted they can't be used again; no tensors of the host.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, ProcessGroup, ProcessGroupGloo

from elastic_train.testing.rehearsal.build import load_library
from elastic_train.testing.rehearsal.device import NAME


def register() -> None:
    """Have torch make one in each group for `torch.device("rehearsal")`. Once per process, after `load`."""
    if NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _form, extended_api=True, devices=[NAME])
    # Two backends that torch doesn't know share one type, and a group keeps one backend of a type: that of
    # the host would get the device's tensors.
    keep = ProcessGroup._register_backend

    def _register(group: ProcessGroup, device: torch.device, kind: Any, backend: Any = None) -> None:
        keep(group, device, ProcessGroup.BackendType.XCCL if device.type == NAME else kind, backend)

    ProcessGroup._register_backend = _register  # type: ignore[method-assign]


def _form(options: Any, _backend_options: object) -> Backend:
    below: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    below._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    below._threads = 2
    below._timeout = options.timeout
    gloo = ProcessGroupGloo(options.store, options.group_rank, options.group_size, below)
    return load_library().communicator(gloo)
