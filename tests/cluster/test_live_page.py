"""The page that a run serves itself: what it shows, to whom, and that nothing of it is left."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.cluster.driver.live_page import LivePage, live_page
from elastic_train.cluster.run_updates import RunUpdate
from elastic_train.config import Batch, RunSpec
from elastic_train.control.fault_schedule import FaultSchedule, KillNode, Moment
from elastic_train.errors import ConfigError
from elastic_train.observe.journal_records import Record, to_json, wall_text
from elastic_train.show.address import said_address
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.journal import Journal
from elastic_train.testing.simulator import Simulation, simulated_policy

pytestmark = pytest.mark.ring1


@pytest.fixture(scope="module")
def records() -> list[Record]:
    schedule = FaultSchedule(faults=(KillNode(when=Moment(step=8), node="b"),), seed=1)
    simulation = Simulation(policy=simulated_policy(), schedule=schedule, records=[])
    simulation.run()
    return [replace(r, wall=wall_text(1.7e9 + r.seconds)) for r in simulation.records or ()]


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    return RunSpec(
        name="gpt",
        storage_path=str(tmp_path),
        batch=Batch(global_size=8, micro_size=1),
        max_steps=15,
        min_workers=1,
        max_workers=4,
    )


def update(records: list[Record], term: int = 1) -> RunUpdate:
    return RunUpdate(term=term, next=0, records=tuple(records), heartbeats=(), ended=None, error=None)


def got(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def test_a_run_shows_itself_from_its_beginning_to_its_end_and_leaves_nothing(
    spec: RunSpec, records: list[Record]
) -> None:
    before = set(threading.enumerate())
    news: list[dict[str, str]] = []
    half = len(records) // 2

    def looks(url: str) -> None:
        with urllib.request.urlopen(f"{url}run/0/stream", timeout=30) as stream:
            for line in stream:
                if (said := line.decode().strip()) == "event: over":
                    return
                if said.startswith("data: {"):
                    news.append(json.loads(said[6:]))

    with live_page(spec, 0) as live:
        assert live is not None
        page, address = live
        assert address.token is None
        assert "nothing yet" in got(address.url)[1]
        page.hear(update(records[:half]))
        somebody = threading.Thread(target=looks, args=(address.url,))
        somebody.start()
        while not news:
            threading.Event().wait(0.05)
        page.hear(update(records[half:]))
    somebody.join(20)
    assert not somebody.is_alive()
    shown = {name: html for one in news for name, html in one.items()}  # a section comes when it changes
    assert "finished" in shown["head"]
    until = time.monotonic() + 20
    while left := {
        thread.name for thread in set(threading.enumerate()) - before
    }:  # the server's own end soon
        assert time.monotonic() < until, left
        time.sleep(0.05)
    with socket.create_server((address.host, address.port)):
        pass  # the port is free again


def test_what_a_run_did_before_this_submission_is_shown_too(spec: RunSpec, records: list[Record]) -> None:
    store = open_store(f"{spec.storage_path}/{spec.name}")
    RunDirectory(store).create({"max_steps": 15}, {})
    journal = Journal(store, 1)
    third = len(records) // 3
    for record in records[: 2 * third]:  # the newest of them come from the controller as well
        journal.append(to_json(record))
    journal.flush()
    page = LivePage(spec)
    page.hear(update(records[third : third + 1], term=2))
    page.hear(update(records[third + 1 :], term=2))
    whole = LivePage(replace(spec, name="other"))
    whole.hear(update(records))
    assert page.look().told == whole.look().told


def test_what_is_shown_does_not_change_while_somebody_draws_it(spec: RunSpec, records: list[Record]) -> None:
    page = LivePage(spec)
    page.hear(update(records[:-5]))
    shown = page.look()
    before = repr(shown.told)
    page.hear(update(records[-5:]))
    assert repr(shown.told) == before != repr(page.look().told)


def test_other_machines_need_a_token_and_none_is_made_up_where_one_was_given(spec: RunSpec) -> None:
    with live_page(spec, "0.0.0.0:0") as live:
        assert live is not None
        assert len(live[1].token or "") > 20
        assert got(f"http://127.0.0.1:{live[1].port}/metrics")[0] == 401
    with live_page(spec, "0.0.0.0:0", "mine") as live:
        assert live is not None
        assert live[1].url.endswith("?token=mine")
        bearer = {"Authorization": "Bearer mine"}
        assert got(f"http://127.0.0.1:{live[1].port}/metrics", **bearer)[0] == 200


def test_a_run_that_fails_takes_its_page_along_at_once(spec: RunSpec) -> None:
    def fails() -> None:
        with live_page(spec, 0) as live:
            found.append(live)
            raise ValueError("whatever ends a run")

    found: list[Any] = []
    with pytest.raises(ValueError, match="whatever"):
        fails()
    with socket.create_server(("127.0.0.1", found[0][1].port)):
        pass


def test_a_run_that_nobody_asked_for_a_page_starts_nothing(spec: RunSpec) -> None:
    before = threading.enumerate()
    with live_page(spec, None) as live:
        assert live is None
        assert threading.enumerate() == before


@pytest.mark.parametrize("said", ["", "here:", ":8420", "70000", "a:b", -1, True, "8420/page"])
def test_what_is_no_address_is_refused_with_one_that_is(said: str | int) -> None:
    with pytest.raises(ConfigError, match=r"8420 serves this machine alone"):
        said_address(said, "fit(page=...)")


def test_an_address_is_a_port_of_this_machine_or_a_host_with_one() -> None:
    assert said_address(8420, "") == said_address("8420", "") == ("127.0.0.1", 8420)
    assert said_address("[::1]:0", "") == ("::1", 0)
    assert said_address("head.cluster:80", "") == ("head.cluster", 80)


def test_a_port_that_is_taken_and_a_missing_extra_are_refused_by_name(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{said} can't be listened to"), live_page(spec, said):
            pass
    with pytest.raises(ConfigError, match="can't be listened to"), live_page(spec, "192.0.2.1:1"):
        pass
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=r"uvicorn.*elastic_train\[ui\]"), live_page(spec, 0):
        pass
