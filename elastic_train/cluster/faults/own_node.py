"""Fault primitives on this node: kill it, and resume a stopped process later."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

import psutil


def kill_own_node(after_s: float = 0.0) -> None:
    """End the raylet that started this process, everything that it started, and this process last."""
    threading.Event().wait(after_s)
    raylet = psutil.Process(os.getppid())
    others = [child.pid for child in raylet.children(recursive=True) if child.pid != os.getpid()]
    for pid in (*others, raylet.pid, os.getpid()):
        os.kill(pid, signal.SIGKILL)


def wake_later(pid: int, seconds: float) -> None:
    """Have a process that stands still go on after a while, whatever becomes of this one."""
    wake = f"sleep {seconds}; kill -CONT {pid}"
    subprocess.Popen(["sh", "-c", wake], start_new_session=True)
