"""Several hosts on one machine, each a network namespace, so that one can be cut off silently.

A host whose link is down is a black hole: no packet comes back, no connection is reset. Needs root and `ip`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

GCS_PORT = 6399
NUMBERS = itertools.count()
"""Of the networks of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Addresses that begin with `prefix`, of which `bits` are the network's. `detour`: each host has another
    interface first, which its default route leads to, with the same address everywhere and nobody behind it.
    """

    prefix: str
    bits: int
    detour: str = ""

    def of(self, host: int) -> str:
        return f"{self.prefix}{host + 1}"


PLAIN = Network(prefix="10.231.77.", bits=24)
IPV6_ALONE = Network(prefix="fd00:231:77::", bits=64)
WRONG_FIRST = Network(prefix="10.231.77.", bits=24, detour="172.31.77.1/16")


def why_not() -> str:
    """Why this machine cannot have such hosts; "" where it can."""
    if shutil.which("ip") is None:
        return "there is no `ip` command"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"et-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return ""


class Hosts:
    """`count` hosts h0, h1, ... on one bridge, with a Ray cluster: h0 its head without CPUs, 1 CPU on others.

    `environment` is the whole environment of its processes. The head is told its address, the others find
    theirs by the way to the head. Use as a context manager: it ends what runs inside its namespaces, and
    nothing else.
    """

    def __init__(self, count: int, environment: Mapping[str, str], network: Network = PLAIN) -> None:
        self._count, self._environment, self._network = count, dict(environment), network
        self._tag = f"et{os.getpid() % 100_000}n{next(NUMBERS) % 100}"
        self._temporary = Path(tempfile.mkdtemp(prefix="et-", dir="/tmp"))

    @property
    def address(self) -> str:
        head = self._network.of(0)
        return f"[{head}]:{GCS_PORT}" if ":" in head else f"{head}:{GCS_PORT}"

    def name(self, host: int) -> str:
        return f"{self._tag}h{host}"

    def inside(self, host: int, *command: str) -> list[str]:
        """The command line that runs a command on a host."""
        return ["ip", "netns", "exec", self.name(host), *command]

    def processes(self, host: int) -> list[int]:
        """Ids of what runs on a host."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.name(host)], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in found.stdout.split()]

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
            space, outer, net = self.name(host), f"{self._tag}v{host}", self._network
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            if net.detour:
                _ip("-n", space, "link", "add", "detour", "type", "veth", "peer", "name", "nobody")
                _ip("-n", space, "addr", "add", net.detour, "dev", "detour")
                _ip("-n", space, "link", "set", "detour", "up")
                _ip("-n", space, "link", "set", "nobody", "up")
                _ip("-n", space, "route", "add", "default", "dev", "detour")
            _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", outer, "master", f"{self._tag}b", "up")
            at_once = ("nodad",) if ":" in net.prefix else ()  # no waiting whether others have it
            _ip("-n", space, "addr", "add", f"{net.of(host)}/{net.bits}", "dev", "eth0", *at_once)
            _ip("-n", space, "link", "set", "eth0", "up")

    def _start_ray(self) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        common = ("--num-gpus=0", "--object-store-memory=150000000", "--disable-usage-stats")
        self._run(
            0,
            ray,
            "start",
            "--head",
            f"--node-ip-address={self._network.of(0)}",
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
            for pid in self.processes(host):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for host in range(self._count):
            subprocess.run(["ip", "netns", "del", self.name(host)], capture_output=True, check=False)
            # With its namespace it would go some time later.
            subprocess.run(["ip", "link", "del", f"{self._tag}v{host}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"{self._tag}b"], capture_output=True, check=False)
        shutil.rmtree(self._temporary, ignore_errors=True)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr.strip()}"
