"""Spot interruption notices of each cloud, asked from its instance metadata service.

A cloud is one entry of `CLOUDS`: `Notices(cloud=...)` takes its key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

ANSWER_S = 1.0
GCP_NOTICE_S = 25.0  # of 30
WHOLE_SECONDS = timedelta(seconds=1)  # up to which an answer's date leaves out what is more


@dataclass(frozen=True, slots=True)
class Cloud:
    """`seconds_left` asks an endpoint for the seconds until this machine goes: None without a notice, OSError
    where nobody answers.
    """

    endpoint: str
    seconds_left: Callable[[str], float | None]


def aws(endpoint: str) -> float | None:
    """EC2's instance-action of IMDSv2: 404 until there is one, two minutes ahead. It is counted by the clock
    of the service, which says the time with its answer: this machine's may be wrong.
    """
    token = _fetch(f"{endpoint}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    headers = {} if token is None else {"X-aws-ec2-metadata-token": token.text}
    action = _fetch(f"{endpoint}/latest/meta-data/spot/instance-action", headers)
    if action is None:
        return None
    when = datetime.fromisoformat(json.loads(action.text)["time"])
    return max(0.0, (when - action.at).total_seconds())


def gcp(endpoint: str) -> float | None:
    """Compute Engine's `preempted`: TRUE for the last half minute."""
    said = _fetch(f"{endpoint}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return GCP_NOTICE_S if said is not None and said.text.strip() == "TRUE" else None


@dataclass(frozen=True, slots=True)
class _Answer:
    """`at`: when, as whoever answered has it; as this machine has it where that wasn't said."""

    text: str
    at: datetime


def _fetch(url: str, headers: Mapping[str, str], method: str = "GET") -> _Answer | None:
    import urllib.error  # with its TLS a third of what `--help` would load
    import urllib.request

    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return _Answer(answer.read().decode(), _time_of(answer.headers.get("Date")))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def _time_of(date: str | None) -> datetime:
    if date is not None:
        try:
            said = parsedate_to_datetime(date)
        except ValueError:
            pass
        else:
            return (said if said.tzinfo is not None else said.replace(tzinfo=UTC)) + WHOLE_SECONDS
    return datetime.now(UTC)


CLOUDS: Mapping[str, Cloud] = {
    "aws": Cloud("http://169.254.169.254", aws),
    "gcp": Cloud("http://metadata.google.internal", gcp),
}
