"""Machines that leave with notice, whoever gives it: what they hold is handed over."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psutil
import pytest
import ray

from elastic_train.cluster.driver.launch import fit, prepare_local_environment
from elastic_train.cluster.driver.result import Result
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.cluster.worker.spot_notices import SIGTERM_NOTICE_S
from elastic_train.config import Notices
from elastic_train.control.events import GroupReady, NodesChanged, StepCommitted, WorkerReady
from elastic_train.control.fault_schedule import DrainNode, FaultSchedule, Moment
from elastic_train.observe.journal_records import Record, from_json
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.journal import read_journal
from elastic_train.testing.slow_samples import SlowSamples
from jobs.pretrain_lm import Pretrain
from tests.cluster.conftest import eventually
from tests.cluster.test_notices import metadata_server
from tests.faults.conftest import Runs, assert_same_training

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(600)]
STEPS, SECONDS_PER_SAMPLE, NOTICE_S = 40, 0.1, 60.0
POD = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


class SlowPretrain(Pretrain):
    def dataset(self):
        return SlowSamples(super().dataset(), SECONDS_PER_SAMPLE)


@pytest.fixture
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Four nodes for each test, because each takes some away."""
    prepare_local_environment()
    with LocalCluster(4) as cluster:
        yield Runs(cluster, tmp_path_factory.mktemp("runs"))


def test_notices_of_two_nodes_at_once_are_one_pause_and_cost_no_step(runs: Runs) -> None:
    faults = tuple(DrainNode(when=Moment(step=8), node=n, notice_s=NOTICE_S) for n in ("n0", "n1"))
    rough = runs.disturbed(
        "two", FaultSchedule(faults=faults, seed=1), workers="2:4", standby=0, max_steps=STEPS
    )
    assert_same_training(rough, runs.calm(steps=STEPS))
    assert rough.ledger.superseded == ()
    assert [r.formed.dp for r in rough.records if r.formed][-1] == 2
    pauses = sum("Pause" in r.commands and "leaving" in r.reason for r in rough.records)
    assert pauses <= 2, "one, unless a look at the nodes fell between the two notices"
    assert left_after(rough) < NOTICE_S


def test_a_notice_that_is_too_short_is_a_loss_like_any_other(runs: Runs) -> None:
    faults = (DrainNode(when=Moment(step=8), node="n0", notice_s=0.05),)
    rough = runs.disturbed(
        "short", FaultSchedule(faults=faults, seed=2), workers="2:4", standby=0, max_steps=STEPS
    )
    assert_same_training(rough, runs.calm(steps=STEPS))


def test_sigterm_lets_a_worker_hand_over_what_it_holds(runs: Runs) -> None:
    def terminate(seen: list[Record]) -> None:
        pid = next(r.event.pid for r in seen if isinstance(r.event, WorkerReady))
        os.kill(pid, signal.SIGTERM)

    result = slow_run(runs, "sigterm", at_step(5, terminate))
    assert leaving(result)
    assert left_after(result) < SIGTERM_NOTICE_S
    assert result.ledger.superseded == ()


def test_the_sigterm_of_a_pod_is_a_drain(runs: Runs) -> None:
    """KubeRay starts a node by `bash -c -- "ulimit ...; ray start ... --block"`: process 1 of a container,
    to which the kernel gives only signals that it handles.
    """
    cannot = subprocess.run([*POD, "true"], capture_output=True, text=True)
    if cannot.returncode:
        pytest.skip(f"no namespace of processes can be made here: {cannot.stderr.strip()}")
    address = runs.cluster.cluster.address
    command = f"ulimit -n 65536; ray start --address={address} --num-cpus=1 --block"
    environment = {**os.environ, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(int(NOTICE_S))}
    pod = subprocess.Popen([*POD, "/bin/bash", "-c", "--", command], env=environment)
    try:
        eventually("a sixth node", lambda: sum(node["Alive"] for node in ray.nodes()) == 6)
        (first,) = psutil.Process(pod.pid).children()
        result = slow_run(runs, "pod", at_step(5, lambda _: first.terminate()), workers="2:5")
        assert leaving(result)
        assert left_after(result) < NOTICE_S
        assert result.ledger.superseded == ()
        pod.wait(timeout=2 * NOTICE_S)  # it ends by itself, in its grace
    finally:
        pod.kill()
        pod.wait()


def test_a_clouds_notice_makes_its_node_leave_in_time(runs: Runs) -> None:
    with metadata_server() as (said, endpoint):

        def give_notice(_: list[Record]) -> None:
            when = datetime.now(UTC) + timedelta(seconds=90)
            said.once = f'{{"action": "terminate", "time": "{when:%Y-%m-%dT%H:%M:%SZ}"}}'

        result = slow_run(
            runs,
            "cloud",
            at_step(5, give_notice),
            notices=Notices(cloud="aws", endpoint=endpoint, every_s=0.3),
        )
    assert leaving(result)
    assert left_after(result) < 90.0
    assert result.ledger.superseded == ()


Act = Callable[[list[Record]], None]


def at_step(step: int, act: Act) -> Callable[[str], None]:
    """Act once the journal in a run's storage knows a step."""

    def wait(url: str) -> None:
        store = open_store(url)

        def there() -> list[Record]:
            seen = [from_json(line) for _, part in read_journal(store) for line in part]
            committed = (record.event for record in seen if isinstance(record.event, StepCommitted))
            return seen if any(event.step >= step for event in committed) else []

        act(eventually(f"step {step}", there))

    return wait


def slow_run(runs: Runs, name: str, beside: Callable[[str], None], **changes: Any) -> Result:
    """A run with something beside it; every step once, whatever happened."""
    workers = changes.pop("workers", "2:4")
    task, spec = runs.spec(name, workers=workers, standby=0, max_steps=STEPS)
    helper = threading.Thread(target=beside, args=(str(runs.storage / name),))
    helper.start()
    result = fit(
        SlowPretrain(**vars(task)),
        dataclasses.replace(spec, **changes),
        address=None,
        local_nodes=0,
        quiet=False,
    )
    helper.join()
    assert result.outcome == "finished"
    assert [entry.step for entry in result.ledger.kept] == list(range(1, STEPS + 1))
    return result


def left_after(result: Result) -> float:
    """Seconds from the first notice until a group without the nodes that leave had its state."""
    reported = next(r for r in result.records if leaving_nodes(r))
    gone = leaving_nodes(reported)
    good = {r.formed.generation for r in result.records if r.formed and gone.isdisjoint(r.formed.nodes)}
    ready = next(r for r in result.records if isinstance(r.event, GroupReady) and r.event.generation in good)
    return ready.seconds - reported.seconds


def leaving_nodes(record: Record) -> set[str]:
    event = record.event
    return {n.name for n in event.nodes if n.drain_by} if isinstance(event, NodesChanged) else set()


def leaving(result: Result) -> bool:
    """Whether a node left with notice."""
    return any(leaving_nodes(record) for record in result.records)
