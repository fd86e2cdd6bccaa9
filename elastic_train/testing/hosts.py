"""Several hosts on one machine, each a network namespace, so that one can be cut off silently.

A host whose link is down is a black hole: no packet comes back, no connection is reset. Needs root and `ip`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

NETWORK = "10.231.77"
GCS_PORT = 6399


def why_not() -> str:
    """Why this machine cannot have such hosts; "" where it can."""
    if shutil.which("ip") is None:
        return "there is no `ip` command"
    if os.geteuid() != 0:
        return "network namespaces need root"
    made = subprocess.run(["ip", "netns", "add", "et-probe"], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", "et-probe"], check=True)
    return ""


class Hosts:
    """`count` hosts h0, h1, ... on one bridge, with a Ray cluster: h0 its head without CPUs, 1 CPU on others.

    `environment` is the whole environment of its processes. Use as a context manager: it ends what runs
    inside its namespaces, and nothing else.
    """

    def __init__(self, count: int, environment: Mapping[str, str]) -> None:
        self._count, self._environment = count, dict(environment)
        self._tag = f"et{os.getpid() % 100_000}"
        self._temporary = Path(tempfile.mkdtemp(prefix="et-", dir="/tmp"))

    @property
    def address(self) -> str:
        return f"{NETWORK}.1:{GCS_PORT}"

    def name(self, host: int) -> str:
        return f"{self._tag}h{host}"

    def inside(self, host: int, *command: str) -> list[str]:
        """The command line that runs a command on a host."""
        return ["ip", "netns", "exec", self.name(host), *command]

    def cut(self, host: int) -> None:
        """From now on nothing reaches the host and nothing leaves it."""
        _ip("-n", self.name(host), "link", "set", "eth0", "down")

    def __enter__(self) -> Hosts:
        try:
            self._wire()
            self._start_ray()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _wire(self) -> None:
        _ip("link", "add", f"{self._tag}b", "type", "bridge")
        _ip("link", "set", f"{self._tag}b", "up")
        for host in range(self._count):
            space, outer = self.name(host), f"{self._tag}v{host}"
            _ip("netns", "add", space)
            _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", outer, "master", f"{self._tag}b", "up")
            _ip("-n", space, "addr", "add", f"{NETWORK}.{host + 1}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def _start_ray(self) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        common = ("--num-gpus=0", "--object-store-memory=150000000", "--disable-usage-stats")
        self._run(
            0,
            ray,
            "start",
            "--head",
            f"--node-ip-address={NETWORK}.1",
            f"--port={GCS_PORT}",
            f"--temp-dir={self._temporary / self.name(0)}",
            "--num-cpus=0",
            "--include-dashboard=false",
            *common,
        )
        starting = [
            subprocess.Popen(
                self.inside(
                    host,
                    ray,
                    "start",
                    f"--address={self.address}",
                    f"--node-ip-address={NETWORK}.{host + 1}",
                    f"--temp-dir={self._temporary / self.name(host)}",
                    "--num-cpus=1",
                    *common,
                ),
                env=self._environment,
                stdout=subprocess.DEVNULL,
            )
            for host in range(1, self._count)
        ]
        assert [process.wait(240) for process in starting] == [0] * len(starting), "a node did not start"

    def _run(self, host: int, *command: str) -> None:
        subprocess.run(
            self.inside(host, *command),
            env=self._environment,
            check=True,
            timeout=240,
            stdout=subprocess.DEVNULL,
        )

    def _close(self) -> None:
        for host in range(self._count):
            found = subprocess.run(
                ["ip", "netns", "pids", self.name(host)], capture_output=True, text=True, check=False
            )
            for pid in found.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for host in range(self._count):
            subprocess.run(["ip", "netns", "del", self.name(host)], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"{self._tag}b"], capture_output=True, check=False)
        shutil.rmtree(self._temporary, ignore_errors=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
