"""Spot interruption notices of each cloud, asked from its instance metadata service.

A cloud is one entry of `CLOUDS`: `Notices(cloud=...)` takes its key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

ANSWER_S = 1.0
GCP_NOTICE_S = 25.0  # of 30


@dataclass(frozen=True, slots=True)
class Cloud:
    """`seconds_left` asks an endpoint for the seconds until this machine goes: None without a notice, OSError
    where nobody answers.
    """

    endpoint: str
    seconds_left: Callable[[str], float | None]


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


def _fetch(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    import urllib.error  # with its TLS a third of what `--help` would load
    import urllib.request

    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


CLOUDS: Mapping[str, Cloud] = {
    "aws": Cloud("http://169.254.169.254", aws),
    "gcp": Cloud("http://metadata.google.internal", gcp),
}
