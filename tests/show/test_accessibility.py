"""What axe finds in the pages, in a real browser, light and dark."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from elastic_train.observe.journal_records import Record
from elastic_train.observe.run_summary import summary_of
from elastic_train.show.model import Shown
from elastic_train.show.page import document, page
from elastic_train.show.several import body

BROWSER = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
AXE = os.environ.get("AXE", "")
MISSING = "AXE names no axe.min.js (npm pack axe-core), or there is no chromium"
pytestmark = [
    pytest.mark.ring1,
    pytest.mark.matrix,
    pytest.mark.skipif(not AXE or BROWSER is None, reason=MISSING),
]
RUN = """
axe.run(document, {resultTypes: ["violations"]}).then((found) => {
  const where = (node) => node.html + " " + node.failureSummary;
  const told = found.violations.map((v) => [v.id, v.help, v.nodes.map(where)]);
  document.title = "axe " + btoa(unescape(encodeURIComponent(JSON.stringify(told))));
});
"""


def violations(html: str, where: Path) -> list[object]:
    scripts = f"<script>{Path(AXE).read_text()}</script><script>{RUN}</script>"
    where.write_text(html.replace("</body>", f"{scripts}</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, *options, f"--user-data-dir={where.parent}/profile", where.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found = re.search(r"<title>axe ([\w+/=]*)</title>", done.stdout)
    assert found is not None, done.stderr
    return json.loads(base64.b64decode(found[1]))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("what", ["running", "finished", "several"])
def test_axe_finds_nothing(rough: list[Record], tmp_path: Path, what: str, theme: str) -> None:
    def shown(records: list[Record]) -> Shown:
        return Shown(
            name="gpt",
            url="/runs/gpt",
            told=summary_of(records),
            config={"max_steps": 60},
            now=records[-1].seconds,
        )

    half = rough[: len(rough) // 2]
    made = {
        "running": lambda: page(shown(half)),
        "finished": lambda: page(shown(rough)),
        "several": lambda: document("runs", body({"/run/0/": shown(rough), "/run/1/": shown(half)})),
    }[what]()
    html = made.replace("<html", f'<html data-theme="{theme}"', 1)
    assert violations(html, tmp_path / "page.html") == []


def test_axe_finds_what_is_wrong(tmp_path: Path) -> None:
    (found,) = violations(document("wrong", "<h1>wrong</h1><img src='data:,'>"), tmp_path / "page.html")
    assert "image-alt" in str(found)
