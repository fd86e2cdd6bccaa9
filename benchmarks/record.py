"""What every benchmark says: machine, versions, commit, results, headline; as JSON and as a table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PEERS_PYTHON = Path(".venv-peers/bin/python")
"""Runs what isn't ours: `make bench-peers` makes it."""
PACKAGES = ("elastic_train", "ray", "torch", "numpy", "pyarrow")


def options(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, fewer rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole record there")
    return parser


def peers_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers", type=Path, default=PEERS_PYTHON, metavar="PYTHON", help="runs systems in other packages"
    )


def machine() -> dict[str, Any]:
    """The machine in numbers that matter, without its name."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": [round(x, 1) for x in os.getloadavg()],
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def commit() -> str:
    """The commit that was measured, with `+` where the working tree differs from it."""
    here = Path(__file__).parent
    try:
        head = _git(here, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def record(
    name: str, *, results: Sequence[Mapping[str, Any]], headline: Mapping[str, float | None], **more: Any
) -> dict[str, Any]:
    """The whole record of one run of a benchmark."""
    return {
        "benchmark": name,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        **more,
        "results": list(results),
        "headline": dict(headline),
    }


def finish(whole: Mapping[str, Any], file: Path | None) -> None:
    """Print the headline and where it was measured; write the record to `file`."""
    at, with_ = whole["machine"], whole["versions"]
    print(f"\n{at['cores']} cores ({at['cpu']}), {at['memory_gib']} GiB, {at['gpus'] or 'no GPU'}")
    print(", ".join(f"{k} {v}" for k, v in with_.items()) + f", commit {whole['commit']}")
    print("headline: " + ", ".join(f"{k} {_shown(v)}" for k, v in whole["headline"].items()))
    if file is not None:
        file.write_text(json.dumps(whole, indent=1) + "\n")


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows of text in columns."""
    lines = [[_shown(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def median(values: Iterable[float | None]) -> float | None:
    """Of the values that were measured; None if there is none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or not under else over / under


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)


def _git(at: Path, *words: str) -> str:
    done = subprocess.run(("git", *words), cwd=at, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _cpu_model() -> str:
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
