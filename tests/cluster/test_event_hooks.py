"""What a hook is told, how often it is tried, and that nobody waits for it."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from elastic_train.cluster.controller import event_hooks
from elastic_train.cluster.controller.event_hooks import TRIES, WAITING, EventHook
from elastic_train.control.changes import Change
from elastic_train.control.events import Cause, Node, NodesChanged, StepCommitted, StopRequested, WorkerLost
from elastic_train.observe.journal_records import FormedGroup, Record, wall_text

pytestmark = pytest.mark.ring1


def record(event: Any, *, commands: tuple[str, ...] = (), **more: Any) -> Record:
    settings = {"reason": "because", "phase": "running"} | more
    return Record(seq=0, wall=wall_text(0.0), event=event, commands=commands, **settings)


def step(number: int) -> Record:
    return record(
        StepCommitted(
            at=0.0,
            generation=1,
            step=number,
            loss=1.0,
            tokens=1.0,
            grad_norm=1.0,
            skipped=False,
            seconds=1.0,
            vote=(),
        )
    )


def lost() -> Record:
    cause = Cause(kind="death", detail="it ended", node="n1")
    change = Change(kind="worker_lost", nodes=("n1",), workers=("w1",), cause="death")
    event = WorkerLost(at=0.0, worker="w1", cause=cause)
    return record(event, commands=("Abort",), phase="settling", change=change)


def node(name: str, drain_by: float | None = None) -> Node:
    return Node(name=name, slots=1, drain_by=drain_by)


def formed(at: int) -> Record:
    group = FormedGroup(
        generation=2, step=at, source="storage", mesh="dp_replicate 2", dp=2, workers=("w0",), nodes=("n0",)
    )
    return record(StopRequested(at=0.0, reason=""), commands=("Form",), formed=group)


@pytest.fixture
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may be slow: a delivery takes its time, and an end waits for it."""
    monkeypatch.setattr(event_hooks, "DELIVER_S", 100.0)
    monkeypatch.setattr(event_hooks, "END_S", 100.0)


def test_a_command_gets_what_happened_and_how_many_steps_it_cost(tmp_path: Path, no_hurry: None) -> None:
    out = tmp_path / "events"
    hook = EventHook(f"cat >> {out}; echo >> {out}", "gpt")
    for line in (
        step(7),
        lost(),
        formed(5),
        record(NodesChanged(at=0.0, nodes=(node("n0"), node("n1", drain_by=9.0), node("n2", drain_by=8.0)))),
        record(StopRequested(at=0.0, reason=""), commands=("End",), ended=("stopped", "")),
    ):
        hook.hear(line)
    hook.close()
    reported = [json.loads(line) for line in out.read_text().splitlines()]
    assert [t["event"] for t in reported] == ["worker_lost", "formed", "nodes_changed", "ended"]
    assert (reported[0]["run"], reported[0]["cause"], reported[0]["node"], reported[0]["step"]) == (
        "gpt",
        "because",
        "n1",
        7,
    )
    assert reported[2]["node"] == "n1, n2", "those that are leaving"
    assert (reported[1]["steps_lost"], reported[1]["step"], reported[1]["plan"]) == (
        2,
        5,
        "dp_replicate 2 on 1 node",
    )


def test_a_url_that_fails_at_first_is_tried_again(no_hurry: None) -> None:
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        tries = 0

        def do_POST(self) -> None:
            Handler.tries += 1
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if Handler.tries < TRIES:
                self.send_error(503)
                return
            got.append(json.loads(body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return None

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        hook = EventHook(f"http://127.0.0.1:{server.server_port}/", "gpt", wait_s=0.01)
        hook.hear(lost())
        hook.close()
        server.shutdown()
        thread.join()
    assert [t["event"] for t in got] == ["worker_lost"]
    assert hook.dropped == 0


def test_a_hook_that_never_works_is_counted_and_costs_the_run_nothing() -> None:
    hook = EventHook("exit 1", "gpt", wait_s=600.0)
    began = time.monotonic()
    for _ in range(WAITING + 10):
        hook.hear(lost())
    assert time.monotonic() - began < 60.0, "not even the first pause was waited for"
    assert hook.dropped >= 8
