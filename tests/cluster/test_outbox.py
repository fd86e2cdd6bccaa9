"""What a process tells the controller comes in order, and few deliveries carry many words that can wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from elastic_train.cluster.outbox import Outbox
from tests.cluster.conftest import eventually

pytestmark = pytest.mark.ring3
LAST = 12


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        "local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000
    )
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_words_that_can_wait_gather_and_go_before_one_that_cannot() -> None:
    heard: list[list[int]] = []
    expired: list[str] = []

    def send(words: list[int], _beat: None) -> ray.ObjectRef:
        heard.append(words)
        return ray.put(LAST not in words)

    outbox = Outbox(send, lambda: None, heartbeat_s=600.0, grace_s=600.0, expired=expired.append)
    outbox.post(0)
    eventually("the first", lambda: heard == [[0]])
    for number in range(1, 10):
        outbox.post(number, can_wait=True)
    outbox.post(10)
    outbox.flush(60.0)
    assert [word for words in heard for word in words] == list(range(11))
    assert len(heard) < 11
    outbox.post(11, can_wait=True)
    eventually("one that nothing follows", lambda: heard[-1] == [11])
    assert not expired
    outbox.post(LAST)
    eventually("its end, as nobody knows it", lambda: expired != [])
