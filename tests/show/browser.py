"""A real Chromium without a window, asked over its DevTools protocol."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

BINARY = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
MISSING = "there is no chromium on PATH, nor named by CHROMIUM: Debian has a package of that name"
START_S = 60.0
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


@dataclass
class Tab:
    """One page. `ask` sends a command of the protocol and returns its answer."""

    socket: aiohttp.ClientWebSocketResponse
    numbers: count[int] = field(default_factory=lambda: count(1))

    async def ask(self, command: str, **values: Any) -> dict[str, Any]:
        number = next(self.numbers)
        await self.socket.send_json({"id": number, "method": command, "params": values})
        while True:
            said = await self.socket.receive_json(timeout=60)
            if said.get("id") == number:
                assert "error" not in said, said
                return said["result"]

    async def value(self, expression: str) -> Any:
        found = await self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def open(self, url: str) -> None:
        await self.ask("Page.navigate", url=url)
        while await self.value("document.readyState") != "complete":
            time.sleep(0.05)

    async def heap(self) -> int:
        """Bytes of JavaScript that are in use once what is unused was given back."""
        for _ in range(2):
            await self.ask("HeapProfiler.collectGarbage")
        return int((await self.ask("Runtime.getHeapUsage"))["usedSize"])

    async def counts(self) -> dict[str, int]:
        """Documents, nodes and listeners that the page keeps."""
        return await self.ask("Memory.getDOMCounters")

    async def picture(self, where: Path, *, width: int = 1280, dark: bool = False) -> None:
        """The whole page as a PNG, as wide as that and as high as it needs."""
        await self.ask(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        size = {"width": width, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.ask("Emulation.setDeviceMetricsOverride", height=800, **size)
        height = int(await self.value("document.documentElement.scrollHeight"))
        await self.ask("Emulation.setDeviceMetricsOverride", height=height, **size)
        made = await self.ask("Page.captureScreenshot", format="png")
        where.write_bytes(base64.b64decode(made["data"]))


@asynccontextmanager
async def browsing(profile: Path) -> AsyncIterator[Tab]:
    """A browser with a profile of its own, for as long as the block lasts."""
    assert BINARY is not None
    process = subprocess.Popen(
        [BINARY, *OPTIONS, f"--user-data-dir={profile}", "about:blank"], stderr=subprocess.DEVNULL
    )
    try:
        port = _port(profile / "DevToolsActivePort", process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                tabs = [one for one in await answer.json() if one["type"] == "page"]
            async with session.ws_connect(tabs[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        process.terminate()
        process.wait(30)


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    until = time.monotonic() + START_S
    while not file.exists() or not file.read_text().strip():
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.1)
    return int(file.read_text().split()[0])
