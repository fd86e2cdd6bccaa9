"""Calls into the processes of a pool that form a group, break it, and work in it."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.tensor import Shard, distribute_tensor

from elastic_train.errors import GroupBroken
from elastic_train.planner.plan import Mesh
from elastic_train.testing.gloo_pool import GlooPool, PerRank
from elastic_train.train.collectives.process_group import Group, is_collective_error
from elastic_train.train.collectives.tcp_store import forget_client, serve_store, store_client

State = dict[str, Any]

FORM_S = 200.0


def new_group(
    store: tuple[str, int], generation: int, rank: int, size: int, address: str = "127.0.0.1"
) -> Group:
    host, port = store
    return Group(
        generation=generation,
        rank=rank,
        world_size=size,
        store_host=host,
        store_port=port,
        address=address,
        form_timeout_s=FORM_S,
    )


def form(state: State, pool_store: tuple[str, int], generation: int, rank: int, size: int) -> None:
    state["group"] = new_group(pool_store, generation, rank, size)
    state["group"].form()


def try_to_form(state: State, *args: Any) -> str:
    try:
        form(state, *args)
    except GroupBroken as error:
        destroy(state)
        return error.reason
    return "formed"


def check_in_only(state: State, store: tuple[str, int], generation: int, rank: int, size: int) -> None:
    """Announce a listening socket and never connect: a member that was stopped while forming."""
    listener = socket.create_server(("127.0.0.1", 0))
    state["listener"] = listener
    client = store_client(*store, check_alive=lambda: None, timeout_s=FORM_S)
    announced = PrefixStore(f"generation/{generation}", client)
    announced.set(f"member/{rank}", json.dumps(listener.getsockname()))


def form_at(state: State, store: tuple[str, int], generation: int, rank: int, size: int) -> None:
    state["group"] = new_group(store, generation, rank, size, address=f"127.0.0.{rank + 2}")
    state["group"].form()


def destroy(state: State) -> None:
    state.pop("group").destroy()


def total(state: State, value: float) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return tensor.item()


def reduce_forever(state: State, elements: int) -> str:
    """All-reduces until one fails; says whether the failure is recognised."""
    state["reduced"] = False
    tensor = torch.ones(elements)
    try:
        while True:
            tensor.fill_(1)
            dist.all_reduce(tensor)
            state["reduced"] = True
    except (RuntimeError, GroupBroken) as error:
        return f"{is_collective_error(error)}"


def receive_from_absent(state: State, operation: str) -> str:
    """The last rank never answers, and its neighbours' messages don't fit into the sockets."""
    state["reduced"] = True
    tensor = torch.ones(1 << 22)
    try:
        getattr(dist, operation)(tensor, dist.get_world_size() - 1)
    except (RuntimeError, GroupBroken) as error:
        return f"{is_collective_error(error)}"
    return "done"


def wait_in_subgroup(state: State, mesh: Mesh) -> str:
    """The first rank of each sub-group never comes to the sub-group's reduction."""
    inner = state["group"].mesh(mesh)["dp_shard"].get_group()
    state["reduced"] = True
    if dist.get_rank(inner) == 0:
        return "absent"
    try:
        dist.all_reduce(torch.ones(4), group=inner)
    except (RuntimeError, GroupBroken) as error:
        return f"{is_collective_error(error)}"
    return "reduced"


def shard_and_sum(state: State, mesh: Mesh) -> float:
    """A sharded tensor through DTensor's cached layouts, on this generation's mesh."""
    made = state["group"].mesh(mesh)
    whole = torch.arange(24.0).reshape(12, 2)
    shard = distribute_tensor(whole, made["dp_shard"], [Shard(0)])
    return ((shard * 2).sum()).full_tensor().item()


def count_resources(state: State) -> tuple[int, int]:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def connect_to_self(state: State) -> None:
    """A connection of this process that has nothing to do with a group."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    state["pair"] = near, far


def talk_to_self(state: State) -> bytes:
    near, far = state.pop("pair")
    with near, far:
        near.sendall(b"intact")
        return far.recv(16)


def break_older(state: State) -> None:
    state["older"].break_()


def keep_as_older(state: State) -> None:
    state["older"] = state["group"]
    destroy(state)


def has_reduced(state: State) -> bool:
    return state.get("reduced", False)


def break_group(state: State) -> None:
    state["group"].break_()


def serve(state: State) -> int:
    state["server"], port = serve_store("127.0.0.1")
    return port


def leave(state: State, port: int) -> None:
    """The end of a run's process: its group, its hand on the store, and the store if it is here."""
    destroy(state)
    forget_client("127.0.0.1", port)
    state.pop("server", None)


def is_connecting(state: State) -> bool:
    return "group" in state and state["group"]._local is not None


def bound_address(state: State) -> str:
    return state["group"]._local[0]


def is_forming(state: State) -> bool:
    return "group" in state


def start(pool: GlooPool, generation: int, ranks: Sequence[int]) -> None:
    """The processes `ranks` form a generation, ranked in the order given."""
    store = (pool.store_host, pool.store_port)
    pool.run(form, store, generation, PerRank(range(len(ranks))), len(ranks), ranks=ranks)


def wait_until(condition: Any, timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
