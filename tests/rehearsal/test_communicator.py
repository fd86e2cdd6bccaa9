"""The rehearsal communicator: NCCL's manners, each seen from outside."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_train.testing.gloo_pool import GlooPool, PerRank
from elastic_train.testing.gloo_worker import Died
from elastic_train.train.collectives.process_group import Group

pytestmark = pytest.mark.ring2
State = dict[str, Any]
DEVICE = "rehearsal"
PAIR = (0, 1)


def form(state: State, rank: int, generation: int, port: int) -> None:
    group = state["group"] = Group(
        generation=generation,
        rank=rank,
        world_size=2,
        store_host="127.0.0.1",
        store_port=port,
        address="127.0.0.1",
        device=DEVICE,
    )
    group.form()
    state["undo"] = group.destroy


@pytest.fixture
def formed(pool: GlooPool) -> GlooPool:
    pool.run(form, PerRank(PAIR), next(pool.generations), pool.store_port, ranks=PAIR)
    return pool


def every_operation(state: State) -> None:
    rank = dist.get_rank()
    mine = torch.full((4,), float(rank + 1), device=DEVICE)
    summed, averaged, largest = mine.clone(), mine.clone(), mine.clone()
    dist.all_reduce(summed)
    dist.all_reduce(averaged, dist.ReduceOp.AVG)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    assert (summed.tolist(), averaged.tolist(), largest.tolist()) == ([3.0] * 4, [1.5] * 4, [2.0] * 4)
    gathered = torch.empty(8, device=DEVICE)
    dist.all_gather_into_tensor(gathered, mine)
    listed = [torch.empty(4, device=DEVICE) for _ in range(2)]
    dist.all_gather(listed, mine)
    assert gathered.tolist() == torch.cat(listed).tolist() == [1.0] * 4 + [2.0] * 4
    part = torch.empty(4, device=DEVICE)
    dist.reduce_scatter_tensor(part, gathered)
    assert part.tolist() == [2.0 * (rank + 1)] * 4
    swapped = torch.empty(4, device=DEVICE)
    dist.all_to_all_single(swapped, mine)
    assert swapped.tolist() == [1.0, 1.0, 2.0, 2.0]
    sent = mine.clone()
    dist.broadcast(sent, 1)
    assert sent.tolist() == [2.0] * 4
    got = torch.empty(4, device=DEVICE)
    pair = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    assert got.tolist() == [2.0 - rank] * 4
    host = torch.tensor([rank])
    dist.all_reduce(host)  # gloo's, beside it
    assert host.item() == 1
    dist.barrier()


def test_every_operation_gives_what_it_gives_elsewhere(formed: GlooPool) -> None:
    formed.run(every_operation, ranks=PAIR)


def late_rank(state: State) -> tuple[bool, float]:
    """One rank comes late: whether the operation was still under way after `wait`, and what came of it."""
    rank = dist.get_rank()
    value = torch.ones(3, device=DEVICE)
    if rank == 1:
        value.add_(1)
        state["go"] = threading.Event()
        state["go"].wait()
    work = dist.all_reduce(value, async_op=True)
    assert work is not None
    work.wait()
    first = not work.is_completed()
    value.mul_(10)  # behind it on the stream, without a host that waits
    return first, value[0].item()


def let_go(state: State) -> None:
    state["go"].set()


def test_a_wait_orders_streams_and_does_not_stop_the_host(formed: GlooPool) -> None:
    under_way = formed.call_async(late_rank, ranks=PAIR)
    while True:
        try:
            formed.control(1, let_go)
        except Exception:  # noqa: BLE001 - it isn't there yet
            continue
        break
    (host_went_on, first), (_, second) = under_way.results()
    assert host_went_on
    assert first == second == 30.0


def refused(state: State) -> list[str]:
    device, told = torch.device(DEVICE), []
    backend = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    for ask in (
        lambda: backend.allreduce([torch.ones(3)]).wait(),
        lambda: dist.all_gather_into_tensor(torch.ones(5, device=device), torch.ones(2, device=device)),
        lambda: dist.reduce_scatter_tensor(torch.ones(2, device=device), torch.ones(5, device=device)),
        lambda: dist.all_reduce(torch.ones(4, 4, device=device).t()),
    ):
        with pytest.raises((RuntimeError, ValueError)) as raised:
            ask()
        told.append(str(raised.value))
    return told


def test_host_tensors_uneven_sizes_and_strides_are_refused(formed: GlooPool) -> None:
    host, gather, scatter, turned = formed.run(refused, ranks=PAIR)[0]
    assert "no tensors of the host" in host
    assert "as large" in gather
    assert "as large" in scatter
    assert "contiguous" in turned


def reduce_and_read(state: State) -> str:
    """Whether the host hears of a peer that is gone, or of the abort."""
    state["began"] = True
    value = torch.ones(3, device=DEVICE)
    dist.all_reduce(value)
    value.tolist()  # hangs where a peer is gone, until somebody aborts
    try:
        dist.all_reduce(value)
    except dist.DistBackendError as refused:
        return str(refused)
    return "used again"


def die(state: State) -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def abort(state: State) -> None:
    state["group"].break_()


def test_peers_of_a_dead_rank_hang_until_they_are_aborted_and_cannot_go_on(formed: GlooPool) -> None:
    waiting = formed.call_async(reduce_and_read, ranks=[0])
    assert isinstance(formed.call_async(die, ranks=[1]).outcomes()[1], Died)
    with pytest.raises(Exception, match="did not answer"):
        waiting.outcomes(timeout=1.5)  # a missing abort is a hang
    formed.control(0, abort)
    assert "aborted" in waiting.results()[0]


def test_a_group_forms_again_in_the_same_process_after_an_abort(formed: GlooPool) -> None:
    for _ in range(2):
        for rank in range(2):
            formed.control(rank, abort)
        formed.run(destroyed, ranks=PAIR)
        formed.run(form, PerRank(PAIR), next(formed.generations), formed.store_port, ranks=PAIR)
        formed.run(every_operation, ranks=PAIR)


def destroyed(state: State) -> None:
    state["group"].destroy()
