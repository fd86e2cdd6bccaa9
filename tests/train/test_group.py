"""Groups form again and again in living processes, side by side and on their own addresses."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress

import pytest

from elastic_train.planner.plan import Mesh
from elastic_train.testing.gloo_pool import GlooPool, PerRank
from tests.train.group_calls import (
    bound_address,
    count_resources,
    destroy,
    form,
    form_at,
    leave,
    serve,
    shard_and_sum,
    start,
    total,
    wait_until,
)

pytestmark = pytest.mark.ring2


def test_members_bind_to_their_own_addresses(pool: GlooPool) -> None:
    store = (pool.store_host, pool.store_port)
    pool.run(form_at, store, next(pool.generations), PerRank([0, 1, 2]), 3, ranks=[0, 1, 2])
    assert pool.run(total, 1.0, ranks=[0, 1, 2]) == [3.0] * 3
    assert pool.run(bound_address, ranks=[0, 1, 2]) == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    pool.run(destroy, ranks=[0, 1, 2])


def test_thirty_generations_of_changing_sizes_leak_nothing(pool: GlooPool) -> None:
    sizes = [4, 2, 3, 4, 1, 3]
    files = threads = 0
    for round_ in range(30):
        ranks = [(round_ + i) % 4 for i in range(sizes[round_ % len(sizes)])]
        start(pool, next(pool.generations), ranks)
        assert pool.run(shard_and_sum, Mesh(dp_shard=len(ranks)), ranks=ranks) == [552.0] * len(ranks)
        pool.run(destroy, ranks=ranks)
        if round_ == len(sizes) - 1:
            files, threads = pool.run(count_resources, ranks=[0])[0]

    def as_before() -> bool:
        """What a thread that has just ended held is given back a moment later."""
        now = pool.run(count_resources, ranks=[0])[0]
        return now[0] <= files and now[1] <= threads

    wait_until(as_before)


def test_two_runs_start_ten_times_side_by_side_though_the_usual_ports_are_taken(pool: GlooPool) -> None:
    """Those of torch's launchers, and each port that a store of the same run had before."""
    pairs = ((0, 1), (2, 3))
    with ExitStack() as taken:
        for port in (29400, 29500):
            with suppress(OSError):  # somebody else has it, which is as good
                taken.enter_context(socket.create_server(("", port)))
        for _ in range(10):
            generation = next(pool.generations)
            ports = pool.run(serve, ranks=[pair[0] for pair in pairs])
            assert len(set(ports)) == 2
            begun = [
                pool.call_async(form, ("127.0.0.1", port), generation, PerRank((0, 1)), 2, ranks=pair)
                for port, pair in zip(ports, pairs, strict=True)
            ]
            for forming, pair in zip(begun, pairs, strict=True):
                forming.results()
                assert pool.run(total, 1.5, ranks=pair) == [3.0, 3.0]
            pool.run(leave, PerRank([ports[0], ports[0], ports[1], ports[1]]), ranks=[0, 1, 2, 3])
            for port in ports:
                with suppress(OSError):
                    taken.enter_context(socket.create_server(("127.0.0.1", port)))
