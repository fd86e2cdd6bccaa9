"""Draw an SVG document as a PNG, by the Chromium or Chrome of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from elastic_train.errors import ConfigError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WITHIN_S = 60.0
SCALE = 2
"""Pixels for each unit of the drawing."""


def png_of(svg: str, field: str) -> bytes:
    """Raises ConfigError where there is no such browser, or where it draws nothing."""
    browser = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    remedy = "Install Chromium, name one in CHROMIUM, or take --svg, which needs nothing."
    if browser is None:
        raise ConfigError(field=field, problem=f"none of {', '.join(BROWSERS)} is on PATH.", remedy=remedy)
    root = ElementTree.fromstring(svg)
    with tempfile.TemporaryDirectory() as made:
        drawing, picture = Path(made, "picture.svg"), Path(made, "picture.png")
        drawing.write_text(svg, encoding="utf-8")
        options = [
            "--headless",
            "--disable-gpu",
            "--hide-scrollbars",
            "--default-background-color=00000000",
            f"--force-device-scale-factor={SCALE}",
            f"--window-size={root.get('width')},{root.get('height')}",
            f"--user-data-dir={made}/profile",
            f"--screenshot={picture}",
        ]
        if os.geteuid() == 0:  # its sandbox refuses root, as which containers run
            options.append("--no-sandbox")
        try:
            done = subprocess.run(
                [browser, *options, drawing.as_uri()],
                capture_output=True,
                text=True,
                timeout=WITHIN_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(field=field, problem=f"{browser} failed: {error}.", remedy=remedy) from error
        if not picture.exists():
            said = done.stderr.strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
            raise ConfigError(field=field, problem=f"{browser} drew nothing: {said[0]}.", remedy=remedy)
        return picture.read_bytes()
