"""A Ray cluster of real processes on this machine, as `ray start` makes it.

It has a dashboard, so that jobs can be submitted, and a head that can be killed. Everything is started with
ports and a directory of its own, and ended by process id: other clusters of the machine are left alone.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil
from ray.util import get_node_ip_address

OBJECT_STORE_BYTES = 100_000_000
START_S = 180.0
HOST = "127.0.0.1"
STARTED = "Ray runtime started"  # as `ray start` says it


class RayProcesses:
    """A head with `head_cpus` CPUs, and nodes that `add_node` starts. Use as a context manager.

    `environment` is what every process is started with, on top of `PATH` and the home directory.
    """

    def __init__(self, environment: Mapping[str, str], *, head_cpus: int = 0) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="et-", dir="/tmp"))  # sockets need a short path
        self.environment = dict(environment)
        self._head_cpus, self._starts = head_cpus, 0
        self._temporary = self._directory
        self.head: psutil.Popen | None = None
        self.nodes: list[psutil.Popen] = []
        self._last: psutil.Popen | None = None
        self._before = frozenset[tuple[str, int, int]]()
        try:
            self.start_head()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """For `ray.init` and `RAY_ADDRESS` of a driver."""
        return f"{get_node_ip_address()}:{self._port}"

    @property
    def jobs(self) -> str:
        """For `ray job submit --address`."""
        return f"http://{HOST}:{self._dashboard}"

    def start_head(self) -> None:
        """Start a head; after `kill_head` a new cluster begins, on other ports."""
        self._port, self._dashboard = free_port(), free_port()
        self._last, self._temporary = None, self._directory / f"s{self._starts}"
        self.head = self._start(
            "--head",
            f"--port={self._port}",
            f"--dashboard-port={self._dashboard}",
            f"--ray-client-server-port={free_port()}",
            f"--num-cpus={self._head_cpus}",
            f"--temp-dir={self._temporary}",
            *self._head_options(),
        )
        self._wait_for(f"{self.jobs}/api/gcs_healthz")  # nobody is asked for a token there

    def add_node(self, cpus: int = 1) -> psutil.Popen:
        """Start a node; the process of its `ray start`, whose children are the node's processes."""
        node = self._start(f"--address={self.address}", f"--num-cpus={cpus}")
        self.nodes.append(node)
        return node

    def kill_head(self) -> None:
        """SIGKILL everything of the head's node, the cluster's state with it."""
        assert self.head is not None
        end_tree(self.head, signal.SIGKILL)
        self.head = None

    def close(self) -> None:
        for process in filter(None, (*self.nodes, self.head)):
            end_tree(process, signal.SIGKILL)
        shutil.rmtree(self._directory, ignore_errors=True)

    def log(self) -> str:
        """What the processes printed, for a failing test."""
        return "\n".join(path.read_text() for path in sorted(self._directory.glob("*.log")))

    def _head_options(self) -> tuple[str, ...]:
        """More arguments for the head's `ray start`, once its port is known."""
        return ()

    def _start(self, *arguments: str) -> psutil.Popen:
        self._wait_for_the_last()
        self._before = self._sockets()
        self._starts += 1
        ports = ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "metrics-export-port")
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--block",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            "--disable-usage-stats",
            *(f"--{name}={free_port()}" for name in ports),
            "--min-worker-port=0",
            "--max-worker-port=0",
            *arguments,
        ]
        environment = self.environment | {"RAY_raylet_start_wait_time_s": str(int(START_S))}
        with (self._directory / f"{self._starts}.log").open("w") as log:
            self._last = psutil.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        return self._last

    def _sockets(self) -> frozenset[tuple[str, int, int]]:
        """Of the raylets that listen, or did: paths, which may be used again, and which file each is."""
        found = ((path, path.lstat()) for path in self._temporary.glob("session_2*/sockets/raylet*"))
        return frozenset((str(path), file.st_ino, file.st_ctime_ns) for path, file in found)

    def _wait_for_the_last(self) -> None:
        """Until what was started last does not mind another one. Nodes give up where they don't find a head
        that is registered, and two raylets that start at once may choose the same name for their sockets, and
        one of them aborts.
        """
        deadline = time.monotonic() + START_S
        while self._last is not None and self._last.poll() is None and not self._is_up():
            assert time.monotonic() < deadline, f"a node is not there after {START_S:.0f} s:\n{self.log()}"
            time.sleep(0.05)

    def _is_up(self) -> bool:
        if self._last is self.head:
            return STARTED in (self._directory / f"{self._starts}.log").read_text()
        return bool(self._sockets() - self._before)

    def _wait_for(self, url: str) -> None:
        deadline = time.monotonic() + START_S
        while True:
            with suppress(OSError), urllib.request.urlopen(url, timeout=2.0):
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"no Ray cluster came up:\n{self.log()}")
            time.sleep(0.2)

    def __enter__(self) -> RayProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def end_tree(root: psutil.Process, number: int) -> None:
    """Signal a process and all that it started, and wait until they are gone."""
    with suppress(psutil.NoSuchProcess):
        processes = [root, *root.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        psutil.wait_procs(processes, timeout=10)


def commands_below(root: psutil.Process) -> dict[int, list[str]]:
    """The command lines of the processes that another one started, by id; without those that ended."""
    found: dict[int, list[str]] = {}
    for process in root.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie is one, too
            found[process.pid] = process.cmdline()
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]
