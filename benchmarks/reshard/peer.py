"""DeepSpeed in `reshard`: run by an interpreter that has it, it trains, writes and converts checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.reshard.state import Size

LIMIT_S = 1200.0
FOUND = "import importlib.util, sys; sys.exit(importlib.util.find_spec('deepspeed') is None)"
STAGES = (1, 2, 3)


class PeerFailed(Exception):
    """The peer ended with an error: its final reports."""


def missing(python: Path) -> str:
    """Why `python` can't run DeepSpeed; empty if it can."""
    if not python.exists():
        return f"there is no {python}: make bench-peers"
    if subprocess.run([python, "-c", FOUND], check=False).returncode:
        return f"{python} has no deepspeed: make bench-peers"
    return ""


def said(python: Path, *words: object) -> dict[str, Any]:
    """What `benchmarks.peers.deepspeed_zero` says when it is run with these words."""
    command = [str(python.absolute()), "-m", "benchmarks.peers.deepspeed_zero", *map(str, words)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise PeerFailed(f"exit code {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(lines[0])


def trained(python: Path, root: Path, size: Size, ranks: int) -> Iterator[tuple[int, Path]]:
    """A checkpoint of each stage after one step, by as many ranks: stage and directory."""
    model = ("--vocabulary", size.vocabulary, "--width", size.width, "--layers", size.layers)
    for stage in STAGES:
        directory = root / f"zero-{stage}"
        said(python, "--ranks", ranks, "train", directory, "--stage", stage, "--steps", 1, *model)
        yield stage, directory


def converted(python: Path, directory: Path) -> dict[str, Any]:
    """Seconds of `ds_to_universal` on the newest checkpoint of a directory, and the bytes that it wrote."""
    tag = (directory / "latest").read_text()
    target = directory / f"{tag}_universal"
    seconds = said(python, "universal", directory / tag, target)["seconds"]
    return {
        "seconds": seconds,
        "bytes_written": sum(p.stat().st_size for p in target.rglob("*") if p.is_file()),
    }
