"""The device as torch's users see it: `torch.device("rehearsal")`, `torch.rehearsal`, `torch.accelerator`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.utils import backend_registration

from elastic_train.testing.rehearsal.build import load_library

NAME = "rehearsal"
"""The type of the device, as `torch.device` takes it."""

GIB = 1 << 30


def load(*, devices: int = 2, memory_bytes: int = 8 * GIB) -> ModuleType:
    """Have the device in this process, with that many of it and that much memory each; its library.

    Once per process: what it is called can't be changed later. Compiles for a minute where nobody did before.
    """
    library = load_library()
    if not hasattr(torch, NAME):
        backend_registration.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, _module(library, memory_bytes))
        backend_registration.generate_methods_for_privateuse1_backend()
    library.set_device_count(devices)
    for device in range(devices):
        library.set_limit(device, memory_bytes)
    return library


@contextmanager
def delays(seconds: float, *, seed: int = 0) -> Iterator[None]:
    """Inside, whatever runs on a queue first waits for up to that long, and copies once more in their middle:
    so that what no event orders comes in another order every time.
    """
    library = load_library()
    library.set_delay(seconds, seed)
    try:
        yield
    finally:
        library.set_delay(0.0, 0)


@contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Inside, nothing that is enqueued in a stream is run: what must wait for it shows that it does."""
    library = load_library()
    library.hold(stream.device_index, stream.stream_id, True)
    try:
        yield
    finally:
        library.hold(stream.device_index, stream.stream_id, False)


def _module(library: ModuleType, memory_bytes: int) -> ModuleType:
    """What `torch.get_device_module` gives for it, with the names that torch's device modules share."""
    made: Any = ModuleType(f"torch.{NAME}")
    made.is_available = lambda: True
    made.is_initialized = lambda: True
    made._initialized = True
    made.init = lambda: None
    made._lazy_init = lambda: None
    made._is_in_bad_fork = lambda: False
    made.device_count = library.device_count
    made.current_device = library.current_device
    made.set_device = lambda device: library.set_device(_index(library, device))
    made.device = _Chosen
    made.get_device_name = lambda device=None: "rehearsal device"
    made.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    made.manual_seed = lambda seed: library.default_generator(-1).manual_seed(seed)
    made.manual_seed_all = lambda seed: [
        library.default_generator(device).manual_seed(seed) for device in range(library.device_count())
    ]
    made.get_rng_state = lambda device=NAME: library.default_generator(_index(library, device)).get_state()
    made.set_rng_state = lambda state, device=NAME: library.default_generator(
        _index(library, device)
    ).set_state(state)
    made.synchronize = lambda device=None: torch.accelerator.synchronize(_index(library, device))
    made.current_stream = lambda device=None: torch.accelerator.current_stream(_index(library, device))
    made.stream = lambda stream: stream  # it is its own context
    made.set_per_process_memory_fraction = lambda fraction, device=None: library.set_limit(
        _index(library, device), int(fraction * memory_bytes)
    )
    made.Stream, made.Event = torch.Stream, torch.Event
    made.cudart = lambda: _Driver
    sys.modules[made.__name__] = made
    return made


class _Chosen:
    """Inside, it is the current one."""

    def __init__(self, device: torch.device | str | int | None) -> None:
        self._library = load_library()
        self._index = _index(self._library, device)

    def __enter__(self) -> None:
        self._before = self._library.current_device()
        self._library.set_device(self._index)

    def __exit__(self, *raised: object) -> None:
        self._library.set_device(self._before)


class _Driver:
    """Of CUDA's driver what pins memory that is there already."""

    @staticmethod
    def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
        load_library().pin(address, nbytes)
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        return 0 if load_library().unpin(address) else 1


def _index(library: ModuleType, device: torch.device | str | int | None) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return library.current_device() if index is None else index
