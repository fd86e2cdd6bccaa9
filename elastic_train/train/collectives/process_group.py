"""One generation's process group: formed, broken from any thread, destroyed; many times in one process.

gloo on CPU is broken through the sockets below it, and an operation that does not notice is left behind;
sub-groups and meshes made later in a generation share its one listening socket and are broken with it,
whoever made them. NCCL is broken by aborting its communicators: written against torch 2.13, untested on
several GPUs. There the launcher must set TORCH_NCCL_ASYNC_ERROR_HANDLING=0, or torch's watchdog ends a
process whose communicator was aborted.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from elastic_train.axes import BATCH, RANKED
from elastic_train.errors import GroupBroken
from elastic_train.planner.plan import Mesh
from elastic_train.train.collectives.interruptible_group import CollectiveFailed, InterruptibleGroup
from elastic_train.train.collectives.mesh_cache import forget_meshes, keep_backward_here
from elastic_train.train.collectives.sockets import Endpoint, endpoints, listening, shut_connections
from elastic_train.train.collectives.tcp_store import (
    InterruptibleStore,
    check_in,
    forget_client,
    store_client,
)

GLOO = "elastic_gloo"
"""Name of the backend as torch knows it: gloo, bound to the address of the rank."""

STORE_PATIENCE_S = 0.5
"""How long after a break a member may still be meeting the others before its store is given up as hung."""

_MARKS = ("gloo", "nccl", "c10d", "processgroup", "process group", "closed by peer", "reset by peer")
"""Words of torch's own errors of operations that are not ours. Those of other errors mean nothing."""

_TORCH = str(Path(torch.__file__).parent)


def is_collective_error(error: BaseException) -> bool:
    """Whether an error, or one that caused it, came out of a collective and not out of user code: by its
    type, or by where it was raised.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, GroupBroken | CollectiveFailed | dist.DistError):
            return True
        marked = isinstance(seen, RuntimeError) and any(mark in str(seen).lower() for mark in _MARKS)
        if marked and _raised_in(seen).startswith(_TORCH):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def _raised_in(error: BaseException) -> str:
    """The file of the innermost frame that an error came through; "" where it was never raised."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at.tb_frame.f_code.co_filename if at is not None else ""


def axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of a device mesh: those of the batch, and the others that are larger than 1."""
    return tuple(name for name in RANKED if name in BATCH or getattr(mesh, name) > 1)


def groups_of(mesh: Mesh, rank: int) -> Iterator[tuple[int, ...]]:
    """The ranks of each group that `rank` is in, in the order in which torch makes them: all, and by axis."""
    sizes = [getattr(mesh, name) for name in axes(mesh)]
    ranks = np.arange(math.prod(sizes)).reshape(sizes)
    here = np.argwhere(ranks == rank)[0]
    yield tuple(range(mesh.size))
    for axis in range(len(sizes)):
        at = (*here[:axis], slice(None), *here[axis + 1 :])
        yield tuple(ranks[at].tolist())


class Group:
    """The process group of one generation, from the view of one of its ranks.

    `break_` may be called from any thread at any time, also while the group forms; everything else belongs to
    the training thread. A process has at most one formed group.
    """

    def __init__(
        self,
        *,
        generation: int,
        rank: int,
        world_size: int,
        store_host: str,
        store_port: int,
        address: str,
        device: str = "cpu",
        form_timeout_s: float = 120.0,
        collective_timeout_s: float = 1800.0,
        meeting: str = "",
    ) -> None:
        """`meeting` tells apart groups that meet in one generation."""
        self.generation = generation
        self.rank = rank
        self.world_size = world_size
        self._store_at = (store_host, store_port)
        self._meeting = f"generation/{generation}{meeting}"
        self._address = address
        self._device = torch.device(device)
        self._form_timeout = timedelta(seconds=form_timeout_s)
        self._collective_timeout = timedelta(seconds=collective_timeout_s)
        self._broken = threading.Event()
        self._busy = 0
        self._store_remote: frozenset[Endpoint] = frozenset()
        self._over = False
        self._lock = threading.Lock()  # a break looks at sockets only while they are this generation's
        self._gloo_device: object | None = None
        self._made: list[InterruptibleGroup] = []
        self._ahead: list[tuple[tuple[int, ...], ProcessGroupGloo]] = []  # connected, and not taken up yet
        self._formed = False  # torch knows of it
        self._local: Endpoint | None = None
        self._remote: frozenset[Endpoint] = frozenset()
        self._store: InterruptibleStore | None = None

    @classmethod
    def alone(cls, generation: int, device: str) -> Group:
        """For work that needs no other: it is never formed, and broken like any."""
        return cls(
            generation=generation,
            rank=0,
            world_size=1,
            store_host="",
            store_port=0,
            address="",
            device=device,
        )

    @property
    def broken(self) -> bool:
        return self._broken.is_set()

    @property
    def silent(self) -> bool:
        """Whether operations that ended may have brought nothing: those of a device that a break ends raise
        nothing, and leave what they were to write as it was.
        """
        return self.broken and self._device.type != "cpu"

    def sum(self, table: torch.Tensor) -> None:
        """Sum over all ranks, in place. The host waits for a device: else nobody knew whether it came."""
        dist.all_reduce(table)
        if self._device.type != "cpu":
            torch.accelerator.current_stream(self._device).synchronize()
            self.check()

    def check(self) -> None:
        """Raise GroupBroken if this generation was broken."""
        if self._broken.is_set():
            raise GroupBroken(generation=self.generation, reason="its collectives were aborted")

    def connect(self, mesh: Mesh, reached: Callable[[str], None] = lambda point: None) -> None:
        """Find the other members and connect every group of a plan's mesh, while this process is in another
        group: `form` takes up what is there then. GroupBroken as from `form`. Any one thread may call it.
        """
        with self._doing("connecting beside another group"):
            store = self._rendezvous(reached)
            reached("met")
            for number, ranks in enumerate(groups_of(mesh, self.rank)):
                met = PrefixStore(f"group/{number}/{ranks[0]}", store)
                self._ahead.append((ranks, self._connected(met, ranks.index(self.rank), len(ranks))))
                if not number:
                    reached("connected")

    def form(self) -> None:
        """Find the other members and connect to all of them; GroupBroken if that fails or is broken off."""
        global _current
        _current, self._formed = self, True
        forget_meshes()
        keep_backward_here()
        hook = sys.excepthook
        try:
            with self._doing("forming the group"):
                if self._store is None:
                    self._rendezvous()
                # Bound to its device, torch would split the groups of a mesh off this one, the host's
                # too, and those would be none that a break knows.
                dist.init_process_group(
                    backend=self._backends(),
                    store=self._store,
                    rank=self.rank,
                    world_size=self.world_size,
                    timeout=self._collective_timeout,
                )
        finally:
            sys.excepthook = hook  # torch wraps it once per group

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Inside, collectives on CPU end at once, with whatever is in their tensors: nobody else is there."""
        for made in self._made:
            made.answers = True
        try:
            yield
        finally:
            for made in self._made:
                made.answers = False

    def mesh(self, mesh: Mesh) -> DeviceMesh:
        """The device mesh of a plan."""
        names = axes(mesh)
        with self._doing("forming the mesh"):
            return init_device_mesh(
                self._device.type, tuple(getattr(mesh, name) for name in names), mesh_dim_names=names
            )

    def break_(self) -> None:
        """End every collective of this generation in this process, running or to come. Idempotent."""
        self._broken.set()
        if self._device.type != "cpu":
            _abort_communicators(self._device)
        started = time.monotonic()
        while self._shut(time.monotonic() - started):
            # A group under construction may open one more connection after each look.
            time.sleep(0.005)

    def destroy(self) -> None:
        """Forget the group, formed or not. The thread must have left its collectives."""
        global _current
        with self._lock:
            self._over = True
        if self._formed:
            if dist.is_initialized():
                dist.destroy_process_group()
            for made in self._made:
                made.release()
            self._made.clear()
            # A failed construction leaves torch's counter of group names behind, which must agree between
            # members that lived through it and members that are new.
            c10d._world.group_count = 0
            forget_meshes()
            _current = None
        self._ahead.clear()
        self._gloo_device = None

    def withdraw(self) -> None:
        """Delete what it left in the store, where nobody will meet there any more."""
        with suppress(RuntimeError):
            if self._store is not None:
                self._store.withdraw()

    def connect_gloo(self, options: Any) -> ProcessGroupGloo | InterruptibleGroup:
        """Construct one gloo group over this generation's listening socket; torch calls it for each group.

        Beside NCCL it must be a plain backend: torch would take a group of ours for that of every device.
        """
        made = self._taken(tuple(options.global_ranks_in_group) or tuple(range(self.world_size)))
        if made is None:
            with self._doing("connecting"):
                made = self._connected(options.store, options.group_rank, options.group_size)
        made.options.group_name = options.group_id
        made.options.global_ranks_in_group = options.global_ranks_in_group
        if self._device.type != "cpu":
            return made
        group = InterruptibleGroup(made, options.store, self.check)
        self._made.append(group)
        return group

    def _backends(self) -> str:
        """gloo for tensors of the host, and for those of an accelerator what torch takes for it."""
        if self._device.type == "cpu":
            return GLOO
        return f"cpu:{GLOO},{self._device.type}:{dist.get_default_backend_for_device(self._device)}"

    def _connected(self, store: Store, rank: int, size: int) -> ProcessGroupGloo:
        gloo: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._devices = [self._gloo_device]
        gloo._threads = 2
        gloo._timeout = self._form_timeout
        made = ProcessGroupGloo(store, rank, size, gloo)
        made.set_timeout(self._collective_timeout)
        made._set_sequence_number_for_group()
        return made

    def _taken(self, ranks: tuple[int, ...]) -> ProcessGroupGloo | None:
        """A group of these ranks that was connected ahead. Torch makes them in one order everywhere."""
        for place, (there, made) in enumerate(self._ahead):
            if there == ranks:
                del self._ahead[place]
                return made
        return None

    def _shut(self, elapsed_s: float) -> bool:
        """Shut what is connected; whether there may be more to come."""
        with self._lock:
            if self._over:
                return False
            if self._local is not None:
                shut_connections(local=self._local, remote=self._remote)
            if self._busy and elapsed_s > STORE_PATIENCE_S:
                forget_client(*self._store_at)
                shut_connections(remote=self._store_remote)
            return self._busy > 0 and elapsed_s < self._form_timeout.total_seconds()

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """Something that connects or meets in the store; GroupBroken if it fails or is broken off."""
        self._busy += 1
        try:
            self.check()
            yield
            self.check()
        except (RuntimeError, TimeoutError, OSError, GroupBroken) as error:
            if isinstance(error, dist.DistNetworkError):
                forget_client(*self._store_at)
            reason = f"aborted while {what}" if self.broken else f"{what} failed: {error}"
            raise GroupBroken(generation=self.generation, reason=reason) from error
        finally:
            self._busy -= 1

    def _rendezvous(self, reached: Callable[[str], None] = lambda point: None) -> InterruptibleStore:
        self._store_remote = endpoints(*self._store_at)
        self._gloo_device, local = _listen(self._address)
        reached("listening")
        client = store_client(*self._store_at, self.check, self._form_timeout.total_seconds())
        prefixed = PrefixStore(self._meeting, client)
        store = self._store = InterruptibleStore(prefixed, self.check, self._form_timeout.total_seconds())
        remote = check_in(store, rank=self.rank, world_size=self.world_size, listener=local, reached=reached)
        with self._lock:
            self._local, self._remote = local, remote
        self.check()
        return store


_current: Group | None = None


def _connect_gloo(options: Any, _backend_options: object) -> ProcessGroupGloo | InterruptibleGroup:
    assert _current is not None, "a gloo group is made inside a generation"
    return _current.connect_gloo(options)


dist.Backend.register_backend(GLOO, _connect_gloo, extended_api=True, devices=["cpu"])


def _listen(address: str) -> tuple[object, Endpoint]:
    """A gloo device that accepts connections at `address`, and where exactly."""
    for _ in range(100):
        before = set(listening().values())
        device = ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
        new = [at for at, inode in listening().items() if inode not in before]
        if len(new) == 1:
            return device, new[0]
        # Another thread opened a listening socket in the same instant: which is gloo's cannot be told.
    raise RuntimeError(f"cannot tell gloo's listening socket on {address} from others of this process")


def _abort_communicators(device: torch.device) -> None:
    """Of every group in this process, the last ones first.

    Aborts of several of NCCL's may wait for each other for ever unless they are one call of it, as torch's
    own `_abort_process_group` makes them (pytorch/pytorch, issue 119797).
    """
    kind = torch.device(device.type)
    named = sorted(dict(c10d._world.pg_names).items(), key=lambda item: item[1], reverse=True)
    backends: list[Any] = [group._get_backend(kind) for group, _ in named if kind in group._device_types]
    together = [backend for backend in backends[-1:] if hasattr(backend, "_group_start")]
    for backend in together:
        backend._group_start()
    try:
        for backend in backends:
            backend.abort()
    finally:
        for backend in together:
            backend._group_end()
