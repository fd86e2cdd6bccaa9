"""The rendezvous store in an actor of its own, so that it survives the death of any member."""

from __future__ import annotations

import ray


class Rendezvous:
    """Serves one store for all generations of a run."""

    def __init__(self) -> None:
        # Here, since torch takes seconds to load: the controller names this class and needs nothing of it.
        from elastic_train.train.collectives.tcp_store import serve_store  # noqa: PLC0415

        self._host = ray.util.get_node_ip_address()
        self._server, self._port = serve_store(self._host)

    def address(self) -> tuple[str, int]:
        return self._host, self._port
