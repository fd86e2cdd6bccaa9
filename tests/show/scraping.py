"""A real Prometheus that scrapes one page, for as long as a test wants."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BINARY = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
MISSING = "there is no prometheus on PATH, nor named by PROMETHEUS: Debian has a package of that name"
Labels = frozenset[tuple[str, str]]
CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: elastic_train
    authorization: {{credentials: "{token}"}}
    static_configs: [{{targets: ["{target}"]}}]
"""


@dataclass(frozen=True, kw_only=True)
class Prometheus:
    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The newest value of each series; HTTPError for what is no PromQL."""
        question = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{question}", timeout=20) as answer:
            return json.load(answer)["data"]["result"]

    def now(self) -> dict[tuple[str, Labels], float]:
        """Every sample of this library by name and labels, those of the scrape left out."""
        return {
            (
                found["metric"]["__name__"],
                frozenset(
                    item for item in found["metric"].items() if item[0] not in ("__name__", "job", "instance")
                ),
            ): float(found["value"][1])
            for found in self.query('{__name__=~"elastic_train_.+"}')
        }

    def seen(self, expression: str, within_s: float) -> set[float]:
        """All values that a series had in the last seconds."""
        (found,) = self.past(expression, within_s).values()
        return set(found.values())

    def past(self, expression: str, within_s: float) -> dict[Labels, dict[float, float]]:
        """The values of each series by their times, in the last seconds."""
        return {
            frozenset(found["metric"].items()): {at: float(value) for at, value in found["values"]}
            for found in self.query(f"{expression}[{within_s:.0f}s]")
        }


@contextmanager
def scraping(target: str, where: Path, *, token: str = "none") -> Iterator[Prometheus]:
    """A Prometheus that scrapes http://TARGET/metrics every second and keeps what it got in a directory."""
    assert BINARY is not None
    where.mkdir(parents=True)
    (where / "prometheus.yml").write_text(CONFIG.format(target=target, token=token))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    options = [
        f"--config.file={where}/prometheus.yml",
        f"--storage.tsdb.path={where}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    process = subprocess.Popen([BINARY, *options])
    try:
        server = Prometheus(url=f"http://127.0.0.1:{port}")
        until = time.monotonic() + 60
        while not _has_scraped(server):
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.2)
        yield server
    finally:
        process.terminate()
        process.wait(30)


def _has_scraped(server: Prometheus) -> bool:
    try:
        return any(found["value"][1] == "1" for found in server.query("up"))
    except (urllib.error.URLError, OSError):
        return False
