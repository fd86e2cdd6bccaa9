"""The live page: an ASGI application over runs that are read from storage.

Each section of a page is sent whole when it changed, by server-sent events, and replaces what was there: so
neither side keeps more of a run the longer it lasts. A run is read once for all who look.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import parse_qsl, urlencode

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elastic_train.errors import StorageError
from elastic_train.show.exposition import CONTENT_TYPE, exposition
from elastic_train.show.model import Shown
from elastic_train.show.page import document, fragments, page
from elastic_train.show.several import body, several

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""This machine, as the header of a request names it."""
COOKIE = "elastic_train_token"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


Parts = Callable[[], Awaitable[tuple[dict[str, str], bool]]]
"""The insides of sections by name, and whether that is the last of them."""


class Source(Protocol):
    """A run that is read from time to time. `look` is called by one thread at a time, and nobody changes what
    it gave.
    """

    def look(self) -> Shown: ...


@dataclass(slots=True)
class Watched:
    """One run for all who look at it: read again when what is known is older than `every_s`."""

    source: Source
    every_s: float
    known: Shown | None = None
    at: float = 0.0
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def shown(self) -> Shown:
        """Raises StorageError where the run was never read and can't be."""
        async with self._lock:
            if self.known is None or time.monotonic() - self.at > self.every_s:
                try:
                    self.known = await run_in_threadpool(self.source.look)
                except StorageError:
                    if self.known is None:
                        raise
                self.at = time.monotonic()
            return self.known


def application(
    sources: Sequence[Source],
    *,
    token: str | None = None,
    every_s: float = 2.0,
    hosts: Sequence[str] = LOOPBACK,
) -> ASGIApp:
    """Pages of runs: `/`, `/run/N/`, `/metrics`. With a `token` only who has it sees anything."""
    watched = {f"/run/{n}/": Watched(source, every_s) for n, source in enumerate(sources)}
    alone = next(iter(watched.values())) if len(watched) == 1 else None

    async def all_shown() -> dict[str, Shown]:
        return {where: await one.shown() for where, one in watched.items()}

    async def home(_: Request) -> Response:
        if alone is not None:
            return HTMLResponse(page(await alone.shown(), stream="/run/0/stream"))
        return HTMLResponse(document("runs", body(await all_shown()), stream="/stream"))

    async def one(request: Request) -> Response:
        found = watched.get(f"/run/{request.path_params['number']}/")
        if found is None:
            return PlainTextResponse("there is no such run here", 404)
        where = f"/run/{request.path_params['number']}/stream"
        return HTMLResponse(page(await found.shown(), stream=where, back="" if alone is not None else "/"))

    async def one_stream(request: Request) -> Response:
        found = watched.get(f"/run/{request.path_params['number']}/")
        if found is None:
            return PlainTextResponse("there is no such run here", 404)

        async def parts() -> tuple[dict[str, str], bool]:
            shown = await found.shown()
            return fragments(shown), shown.told.progress.ended is not None

        return _stream(parts, every_s)

    async def stream(_: Request) -> Response:
        async def parts() -> tuple[dict[str, str], bool]:
            runs = await all_shown()
            return several(runs), False

        return _stream(parts, every_s)

    async def metrics(_: Request) -> Response:
        return Response(exposition((await all_shown()).values()), media_type=CONTENT_TYPE)

    routes = [
        Route("/", home),
        Route("/stream", stream),
        Route("/run/{number:int}/", one),
        Route("/run/{number:int}/stream", one_stream),
        Route("/metrics", metrics),
    ]
    guard = Middleware(_Guard, token=token)
    middleware = [guard] if token else [Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)), guard]
    return Starlette(routes=routes, middleware=middleware, exception_handlers={StorageError: _unreadable})


def _stream(parts: Parts, every_s: float) -> StreamingResponse:
    return StreamingResponse(news(parts, every_s), media_type="text/event-stream")


async def news(parts: Parts, every_s: float) -> AsyncIterator[str]:
    """What changed of the sections, again and again; only digests of what was sent are kept."""
    sent: dict[str, bytes] = {}
    while True:
        inside, over = await parts()
        digests = {name: hashlib.blake2s(html.encode()).digest() for name, html in inside.items()}
        new = {name: inside[name] for name, digest in digests.items() if sent.get(name) != digest}
        sent = digests
        yield f"data: {json.dumps(new)}\n\n" if new else ": nothing new\n\n"
        if over:
            yield "event: over\ndata: {}\n\n"
            return
        await asyncio.sleep(every_s)


async def _unreadable(_: Request, error: Exception) -> Response:
    return PlainTextResponse(f"the run can't be read now: {error}", 503)


class _Guard:
    """Lets through whoever has the token: as a bearer, as a cookie, or once in the address, which is then
    put away. Puts the headers that keep a page to itself on every answer.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
            await send(message)

        refused = self._refused(Request(scope))
        await (refused or self._app)(scope, receive, sending)

    def _refused(self, request: Request) -> Response | None:
        if self._token is None:
            return None
        said = request.query_params.get("token", "")
        if said and secrets.compare_digest(said.encode(), self._token.encode()):
            rest = [pair for pair in parse_qsl(request.url.query) if pair[0] != "token"]
            target = request.url.path + (f"?{urlencode(rest)}" if rest else "")
            answer = RedirectResponse(target, 303)
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return answer
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        for word in (bearer, request.cookies.get(COOKIE, "")):
            if secrets.compare_digest(word.encode(), self._token.encode()):
                return None
        return PlainTextResponse("this page needs its token: open the address that was printed", 401)
