"""Spot interruption notices and SIGTERM: report that this machine is about to go.

Each becomes a drain of the node, as Ray knows it, so that there is one way in which a node leaves: its
workers hand over what they hold and are gone before the deadline. Every worker watches for its own node,
because a cloud's metadata service answers only on the machine that it is about.
"""

from __future__ import annotations

import http.client
import logging
import signal
import threading
from collections.abc import Callable

from ray.exceptions import RayError

from elastic_train.clouds import CLOUDS
from elastic_train.cluster import ray_private
from elastic_train.config import Notices

log = logging.getLogger(__name__)
SIGTERM_NOTICE_S = 25.0  # Kubernetes kills 30 s after its SIGTERM


def heed(notices: Notices | None) -> None:
    """Heed SIGTERM from now on, and the cloud's word if one is named. Call from a worker's main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: _aside(lambda: leave(SIGTERM_NOTICE_S, "SIGTERM")))
    if notices is not None:
        _aside(lambda: watch(notices, leave))


def watch(notices: Notices, leave: Callable[[float, str], None]) -> None:
    """Ask until there is a notice; `leave` gets its seconds and who gave it."""
    cloud, pause = CLOUDS[notices.cloud], threading.Event()
    endpoint = notices.endpoint or cloud.endpoint
    while True:
        try:
            seconds = cloud.seconds_left(endpoint)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as problem:
            log.info("no answer about spot notices from %s: %s", endpoint, problem)
            seconds = None
        if seconds is not None:
            leave(seconds, notices.cloud)
            return
        pause.wait(notices.every_s)


def leave(seconds: float, who: str) -> None:
    """Drain this node."""
    log.warning("%s says that this node goes in %.0f s", who, seconds)
    try:
        ray_private.drain_node(ray_private.this_node(), seconds)
    except RayError as error:  # the node's end is noticed by other signs
        log.warning("the notice was not passed on: %s", error)


def _aside(call: Callable[[], None]) -> None:
    threading.Thread(target=call, name="notices", daemon=True).start()
