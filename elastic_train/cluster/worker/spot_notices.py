"""Notices that this machine is about to go: a cloud's spot interruption, or SIGTERM.

Each becomes a drain of the node, as Ray knows it, so that there is one way in which a node leaves: its
workers hand over what they hold and are gone before the deadline. Every worker watches for its own node,
because a cloud's metadata service answers only on the machine that it is about.
"""

from __future__ import annotations

import http.client
import json
import logging
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from ray.exceptions import RayError

from elastic_train.cluster import ray_private
from elastic_train.config import Notices

log = logging.getLogger(__name__)
ANSWER_S = 1.0
SIGTERM_NOTICE_S = 25.0  # Kubernetes kills 30 s after its SIGTERM
GCP_NOTICE_S = 25.0  # of 30
ENDPOINTS: Mapping[str, str] = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
}

Ask = Callable[[str], float | None]
"""From an endpoint to the seconds until this machine goes, None without a notice. OSError: nobody answers."""


def aws(endpoint: str) -> float | None:
    """EC2's instance-action of IMDSv2: 404 until there is one, two minutes ahead."""
    token = _fetch(f"{endpoint}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    headers = {} if token is None else {"X-aws-ec2-metadata-token": token}
    action = _fetch(f"{endpoint}/latest/meta-data/spot/instance-action", headers)
    if action is None:
        return None
    when = datetime.fromisoformat(json.loads(action)["time"])
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def gcp(endpoint: str) -> float | None:
    """Compute Engine's `preempted`: TRUE for the last half minute."""
    said = _fetch(f"{endpoint}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return GCP_NOTICE_S if said is not None and said.strip() == "TRUE" else None


CLOUDS: Mapping[str, Ask] = {"aws": aws, "gcp": gcp}


def heed(notices: Notices | None) -> None:
    """Heed SIGTERM from now on, and the cloud's word if one is named. Call from a worker's main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: _aside(lambda: leave(SIGTERM_NOTICE_S, "SIGTERM")))
    if notices is not None:
        _aside(lambda: watch(notices, leave))


def watch(notices: Notices, leave: Callable[[float, str], None]) -> None:
    """Ask until there is a notice; `leave` gets its seconds and who gave it."""
    ask, pause = CLOUDS[notices.cloud], threading.Event()
    endpoint = notices.endpoint or ENDPOINTS[notices.cloud]
    while True:
        try:
            seconds = ask(endpoint)
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


def _fetch(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def _aside(call: Callable[[], None]) -> None:
    threading.Thread(target=call, name="notices", daemon=True).start()
