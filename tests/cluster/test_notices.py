"""Spot notices, asked from a real server that answers as the clouds' metadata services do."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from elastic_train import clouds
from elastic_train.clouds import GCP_NOTICE_S, aws, gcp
from elastic_train.cluster.worker.spot_notices import watch
from elastic_train.config import Notices
from elastic_train.errors import ConfigError

pytestmark = pytest.mark.ring1
TOKEN = "secret-token"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The services of the clouds are near; this machine may be slow."""
    monkeypatch.setattr(clouds, "ANSWER_S", 100.0)


class Metadata:
    """What the service says; it counts how often it was asked."""

    def __init__(self) -> None:
        self.action: str | None = None
        self.once: str | None = None  # an action that only the first who asks is told
        self.preempted = "FALSE"
        self.asked = 0
        self.broken = False
        self.ahead_s = 0.0  # its clock, before this machine's
        self.again = threading.Event()


@contextmanager
def metadata_server() -> Iterator[tuple[Metadata, str]]:
    said = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
            self._answer(TOKEN if self.path == "/latest/api/token" else None)

        def do_GET(self) -> None:
            said.asked += 1
            if said.asked > 2:
                said.again.set()
            if said.broken:
                self.send_error(500)
            elif self.path == "/latest/meta-data/spot/instance-action":
                assert self.headers["X-aws-ec2-metadata-token"] == TOKEN
                once, said.once = said.once, None
                self._answer(once or said.action)
            else:
                assert self.path == "/computeMetadata/v1/instance/preempted"
                assert self.headers["Metadata-Flavor"] == "Google"
                self._answer(said.preempted)

        def _answer(self, text: str | None) -> None:
            if text is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def date_time_string(self, timestamp: float | None = None) -> str:
            now = datetime.now(UTC).timestamp() if timestamp is None else timestamp
            return super().date_time_string(now + said.ahead_s)

        def log_message(self, *_: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield said, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("ahead_s", [0.0, -60.0, 3600.0])
def test_aws_gives_the_seconds_that_are_left_by_its_own_clock_and_nothing_without_a_notice(
    ahead_s: float,
) -> None:
    def now() -> datetime:
        return datetime.now(UTC) + timedelta(seconds=ahead_s)

    with metadata_server() as (said, endpoint):
        said.ahead_s = ahead_s
        assert aws(endpoint) is None
        when = now().replace(microsecond=0) + timedelta(seconds=100)
        said.action = f'{{"action": "terminate", "time": "{when:%Y-%m-%dT%H:%M:%SZ}"}}'
        most = (when - now()).total_seconds()
        left = aws(endpoint)
        assert left is not None
        assert max(0.0, (when - now()).total_seconds() - 1.0) <= left <= most
        said.action = '{"action": "terminate", "time": "2020-01-01T00:00:00Z"}'
        assert aws(endpoint) == 0.0


def test_gcp_gives_less_than_its_half_minute() -> None:
    with metadata_server() as (said, endpoint):
        assert gcp(endpoint) is None
        said.preempted = "TRUE"
        assert gcp(endpoint) == GCP_NOTICE_S < 30


def test_a_service_that_fails_is_asked_again_until_there_is_a_notice_and_then_no_more() -> None:
    heard: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()
    with metadata_server() as (said, endpoint):
        said.broken = True
        wanted = Notices(cloud="gcp", endpoint=endpoint, every_s=0.01)
        watching = threading.Thread(target=watch, args=(wanted, lambda s, who: heard.put((s, who))))
        watching.start()
        assert said.again.wait(100)
        assert heard.empty()
        said.broken, said.preempted = False, "TRUE"
        assert heard.get(timeout=100) == (GCP_NOTICE_S, "gcp")
        watching.join()


def test_an_unknown_cloud_is_refused() -> None:
    with pytest.raises(ConfigError, match="none of 'aws', 'gcp'"):
        Notices(cloud="other")  # type: ignore[arg-type]
