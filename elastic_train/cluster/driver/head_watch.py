"""Watch the cluster's head while the controller does not answer, to end with a reason before Ray ends the
driver.

Ray ends every process that did not reach the head for a minute, with words of its own and without an error
that anybody could catch. A controller that is silent may only be busy; a head that nobody can connect to is
gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic_train.cluster.controller.probe_addresses import reachable
from elastic_train.cluster.ray_calls import host_and_port
from elastic_train.errors import HeadLost

RAY_ENDS_S = 60.0
"""How long Ray tries to reach the head again, by default."""
BEFORE = 2 / 3
"""Of that time, when we end. A head that is restarted has until then."""
ANSWER_S = 20.0
DOUBT_S = 4.0
"""For how long an answer of the controller is waited for, and once there was none."""


class HeadWatch:
    """`address` is the head's, host:port, which Ray tries to reach for `ray_ends_s`."""

    def __init__(
        self,
        address: str,
        *,
        ray_ends_s: float = RAY_ENDS_S,
        clock: Callable[[], float] = time.monotonic,
        accepts: Callable[[str, int], bool] | None = None,
    ) -> None:
        self._address, self._clock, self._accepts = address, clock, accepts or _accepts
        self._within_s = BEFORE * ray_ends_s
        self._heard = clock()
        self._doubted = False

    @property
    def answer_s(self) -> float:
        """For how long to wait for the controller's next answer."""
        return DOUBT_S if self._doubted else ANSWER_S

    def heard(self) -> None:
        """The controller answered, so there is a head."""
        self._heard, self._doubted = self._clock(), False

    def check(self) -> None:
        """The controller did not answer. HeadLost where nobody answers at the head's address either, and Ray
        ends this process soon.
        """
        self._doubted = True
        host, port = host_and_port(self._address)
        if not port or self._accepts(host, port):
            self._heard = max(self._heard, self._clock() - ANSWER_S)
            return
        silent_s = self._clock() - self._heard
        if silent_s >= self._within_s:
            raise HeadLost(address=self._address, silent_s=silent_s)


def _accepts(host: str, port: int) -> bool:
    return reachable({"head": (host, port)})["head"] == "accepts"
