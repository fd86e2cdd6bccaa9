"""How long does training stand still for a checkpoint?

python -m benchmarks.stall [--quick] [--json FILE] [--plot FILE] [--millions M] [--workers W ...]

A plain loop (square layers, fused AdamW) saves parameters and both moments after each step, or each tenth.
`blocked_ms` is what the training thread spends in the system per save: in the call that saves, and in what
has to be waited for before the next update. `step_ms` holds the slow-down by what goes on in the background
too; its ratio to the bare step of the same processes is `step_overhead_ratio`. Every system runs in fresh
processes, in turns, with two updates after the last save; then what it saved is read and compared with the
state it was asked to save: one that differs is torn.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.stall_plot import plot

OURS = "ours (peer)"
SYNC = "DCP save"
ASYNC = ("DCP async_save", "torchsnapshot")
LIMIT_S = 900.0
NAMES = (
    "none",
    OURS,
    "ours (peer + storage)",
    "torch.save",
    SYNC,
    "DCP async_save (thread)",
    "DCP async_save (DefaultStager)",
    "DCP async_save (DefaultStager, background)",
    "DCP async_save (process)",
)


def run(system: str, *, every: int, workers: int, millions: float, steps: int) -> dict[str, Any]:
    """One repetition: the slowest rank's figures, or why there are none."""
    with tempfile.TemporaryDirectory(prefix="stall-") as directory, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", "benchmarks.stall_run", "--system", system, "--directory", directory]
        command += ["--every", str(every), "--workers", str(workers), "--port", str(port)]
        command += ["--millions", str(millions / workers), "--steps", str(steps)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(workers)
        ]
        told = [_told(process) for process in ranks]
    about = {"system": system, "every": every, "workers": workers}
    wrong = [error for found, error in told if found is None]
    if wrong:
        return {**about, "absent": wrong[0]}
    found = [result for result, _ in told if result is not None]
    return {
        **about,
        **{key: max(r[key] for r in found) for key in ("step_ms", "blocked_ms", "bare_step_ms", "skipped")},
        **{key: sum(r[key] for r in found) for key in ("state_mb", "memory_mb")},
        "saves": found[0]["saves"],
        "torn": next((r["torn"] for r in found if r["torn"]), found[0]["torn"]),
        "ratio": max(r["step_ms"] for r in found) / max(r["bare_step_ms"] for r in found),
    }


def _told(process: subprocess.Popen[str]) -> tuple[dict[str, Any] | None, str]:
    try:
        out, error = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return None, f"no answer within {LIMIT_S:.0f} s"
    for line in out.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line[7:]), ""
    lines = error.strip().splitlines()
    return None, lines[-1] if lines else f"exit code {process.returncode}"


def headline(results: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """One process, saving after every step: medians over the repetitions."""
    medians: dict[str, float] = {}
    overheads: dict[str, float] = {}
    for name in NAMES:
        own = [r for r in results if (r["system"], r["every"]) == (name, 1) and "absent" not in r]
        own = [r for r in own if r["workers"] == min(r["workers"] for r in results)]
        if own and not any(r["torn"] for r in own):
            medians[name] = statistics.median(r["blocked_ms"] for r in own)
            overheads[name] = statistics.median(r["ratio"] for r in own)
    blocked = medians.get(OURS)
    rivals = [value for name, value in medians.items() if name.startswith(ASYNC)]

    def times(other: float | None) -> float | None:
        return other / blocked if other is not None and blocked else None

    return {
        "blocked_ms": blocked,
        "x_vs_dcp_sync": times(medians.get(SYNC)),
        "x_vs_best_correct_async": times(min(rivals, default=None)),
        "step_overhead_ratio": overheads.get(OURS),
    }


def main() -> None:
    parser = record.options(__doc__ or "")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the bars there, as SVG")
    parser.add_argument("--millions", type=float, default=0.0, help="million parameters, of all workers")
    parser.add_argument("--workers", type=int, nargs="+", default=[])
    options = parser.parse_args()
    quick = options.quick
    millions = options.millions or (12 if quick else 100)
    repetitions, steps = (1, 12) if quick else (3, 30)
    results: list[dict[str, Any]] = []
    for _ in range(repetitions):
        for workers in options.workers or ([1] if quick else [1, 4]):
            for every in (1,) if quick else (1, 10):
                for name in NAMES:
                    found = run(name, every=every, workers=workers, millions=millions, steps=steps)
                    results.append(found)
                    print(_line(found), flush=True)
    whole = record.record("stall", results=results, headline=headline(results), million_parameters=millions)
    if options.plot is not None:
        options.plot.write_text(plot(results))
    record.finish(whole, options.json)
    broken = [
        r["system"] for r in results if r["system"].startswith("ours") and (r.get("torn") or "absent" in r)
    ]
    if broken:
        raise SystemExit(f"{broken[0]} did not keep the state it was asked to keep")


def _line(found: dict[str, Any]) -> str:
    head = f"{found['system']:44} {found['workers']} workers, every {found['every']:>2}: "
    if "absent" in found:
        return head + f"absent ({found['absent'][:90]})"
    torn = {True: "TORN", False: "whole", None: ""}[found["torn"]]
    step = f"step {found['step_ms']:8.1f} ms ({found['ratio']:.2f} x bare)"
    return head + (
        f"blocked {found['blocked_ms']:8.2f} ms  {step}"
        f"  {found['memory_mb']:7.0f} MB more  {found['skipped']} skipped  {torn}"
    )


if __name__ == "__main__":
    main()
