"""How long does training stand still for a checkpoint?

python -m benchmarks.stall [--quick] [--json FILE] [--plot FILE] [--millions M] [--budget SECONDS]
                           [--peers PYTHON]

A plain loop (square layers, fused AdamW) saves parameters and both moments after each step, or each tenth.
`blocked_ms` is what the training thread spends in the system per save: in the call that saves, and in what
has to be waited for before the next update. The first two saves, in which systems make what they need and
ours looks for writes that it would not notice, are not among those: the longer of them is `first_ms`.
`step_ms` holds the slow-down by what goes on in the background too; its ratio to the bare step of the same
processes is `step_overhead_ratio`. Every system runs in fresh processes, in turns. Afterwards it saves
twice more, each time with an update right behind, and what it saved is read and compared with the state it
was asked to save: one that differs is torn. `memory_mb` is the peak of host memory above that of the bare
loop, processes of the system included. `x_copy` is by how much longer a step is than a bare one, over the
time that one copy of the state takes at the speed of memory: without a core to spare a snapshot cannot cost
less than the copies that it makes, ours two, one for this node and one for another.

First all systems with one process and a save at every step, then at every tenth, then the same with four
processes, then all of it again, as far as the time goes. Systems of other packages are run by an interpreter
that has them (`make bench-peers` makes one) and are absent without it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.stall.peers import PEERS
from benchmarks.stall.plot import plot
from benchmarks.stall.systems import TEARS

OURS = "ours (peer)"
SYNC = "DCP save"
ASYNC = "DCP async_save"
BUDGET_S, QUICK_BUDGET_S = 450.0, 170.0
LIMIT_S = 900.0
STEPS = {1: 6, 10: 21}
"""By how many steps lie between two saves."""
SLOWEST = ("step_ms", "blocked_ms", "first_ms", "bare_step_ms", "copy_ms", "skipped")
NAMES = (
    "none",
    OURS,
    "ours (peer + storage)",
    "torch.save",
    SYNC,
    "DCP async_save (thread)",
    "DCP async_save (DefaultStager)",
    "DCP async_save (DefaultStager, background)",
    TEARS,
    "DCP async_save (process)",
    *PEERS,
)


def run(
    system: str, *, every: int, workers: int, millions: float, steps: int, peers: Path = record.PEERS_PYTHON
) -> dict[str, Any]:
    """One repetition: the slowest rank's figures, or why there are none. `peers` runs what isn't ours."""
    about = {"system": system, "every": every, "workers": workers}
    if system in PEERS and not peers.exists():
        return {**about, "absent": f"there is no {peers}: make bench-peers"}
    with tempfile.TemporaryDirectory(prefix="stall-") as directory, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        python = str(peers.absolute()) if system in PEERS else sys.executable
        command = [python, "-m", "benchmarks.stall.run", "--system", system, "--directory", directory]
        command += ["--every", str(every), "--workers", str(workers), "--port", str(port)]
        command += ["--millions", str(millions / workers), "--steps", str(steps)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [
            Rank([*command, "--rank", str(rank)], environment, Path(directory) / f"rank{rank}")
            for rank in range(workers)
        ]
        reported = [rank.reported() for rank in ranks]
    wrong = [error for found, error in reported if found is None]
    if wrong:
        return {**about, "absent": wrong[0]}
    found = [result for result, _ in reported if result is not None]
    return {
        **about,
        **{key: max(r[key] for r in found) for key in SLOWEST},
        **{key: sum(r[key] for r in found) for key in ("state_mb", "memory_mb")},
        "saves": found[0]["saves"],
        "torn": next((r["torn"] for r in found if r["torn"]), found[0]["torn"]),
        "ratio": max(r["step_ms"] for r in found) / max(r["bare_step_ms"] for r in found),
        "x_copy": max((r["step_ms"] - r["bare_step_ms"]) / r["copy_ms"] for r in found),
    }


class Rank:
    """One process and whatever it starts: some systems leave processes, which would hold on to a pipe."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], logs: Path) -> None:
        self._out, self._error = logs.with_suffix(".out"), logs.with_suffix(".error")
        with self._out.open("w") as out, self._error.open("w") as error:
            self._process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=error, start_new_session=True
            )

    def reported(self) -> tuple[dict[str, Any] | None, str]:
        """Its figures, or the last thing that it said instead."""
        try:
            self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return None, f"no answer within {LIMIT_S:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for line in self._out.read_text().splitlines():
            if line.startswith("RESULT "):
                return json.loads(line[7:]), ""
        lines = [line.strip() for line in self._error.read_text().splitlines() if line.strip()]
        return None, lines[-1] if lines else f"exit code {self._process.returncode}"


def headline(results: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """One process, saving after every step: medians over the repetitions."""
    least = min((r["workers"] for r in results), default=1)
    sound: dict[str, list[dict[str, Any]]] = {}
    for name in NAMES:
        own = [r for r in results if (r["system"], r["every"], r["workers"]) == (name, 1, least)]
        own = [r for r in own if "absent" not in r]
        if own and not any(r["torn"] for r in own):
            sound[name] = own

    def median(name: str, key: str) -> float | None:
        return record.median(r[key] for r in sound.get(name, ()))

    rivals = [name for name in sound if name.startswith(ASYNC) or name in PEERS]
    blocked = median(OURS, "blocked_ms")
    best = min((median(name, "blocked_ms") or 0.0 for name in rivals), default=None)
    found = [r for r in results if "absent" not in r]
    torn = float(len({r["system"] for r in found if r["torn"]}))
    return {
        "blocked_ms": blocked,
        "x_vs_dcp_sync": record.ratio(median(SYNC, "blocked_ms"), blocked),
        "x_vs_best_correct_async": record.ratio(best, blocked),
        "step_overhead_ratio": median(OURS, "ratio"),
        "x_copy_at_memory_speed": median(OURS, "x_copy"),
        "memory_mb": median(OURS, "memory_mb"),
        "torn_peers": torn if found else None,
    }


def main() -> None:
    parser = record.options(__doc__ or "")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the bars there, as SVG")
    parser.add_argument("--millions", type=float, default=0.0, help="million parameters, of all workers")
    parser.add_argument("--workers", type=int, nargs="+", default=[])
    parser.add_argument("--every", type=int, nargs="+", default=[])
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--repetitions", type=int, default=0)
    parser.add_argument("--budget", type=float, default=0.0, metavar="SECONDS", help="begin nothing after it")
    record.peers_option(parser)
    parser.add_argument("--systems", nargs="+", default=NAMES, choices=NAMES, metavar="SYSTEM")
    options = parser.parse_args()
    quick = options.quick
    millions = options.millions or (12 if quick else 100)
    budget = options.budget or (QUICK_BUDGET_S if quick else BUDGET_S)
    turns = [
        (workers, every)
        for _ in range(options.repetitions or (1 if quick else 3))
        for workers in options.workers or ([1] if quick else [1, 4])
        for every in options.every or ([1] if quick else [1, 10])
    ]
    results: list[dict[str, Any]] = []
    began, longest = time.monotonic(), 0.0
    for number, (workers, every) in enumerate(turns):
        # A turn is measured whole or not at all: one system's figures without the others' say nothing.
        if number and time.monotonic() - began + longest > budget:
            print(f"no time for {len(turns) - number} of {len(turns)} turns within {budget:.0f} s")
            break
        turn = time.monotonic()
        for name in options.systems:
            steps = options.steps or STEPS.get(every, 2 * every + 1)
            found = run(
                name, every=every, workers=workers, millions=millions, steps=steps, peers=options.peers
            )
            results.append(found)
            print(_line(found), flush=True)
        longest = max(longest, time.monotonic() - turn)
    whole = record.record("stall", results=results, headline=headline(results), million_parameters=millions)
    plotted = options.plot or (None if quick else Path(tempfile.gettempdir()) / "stall.svg")
    if plotted is not None:
        plotted.write_text(plot(results))
        print(f"plot: {plotted}")
    record.finish(whole, options.json)
    broken = [
        r["system"] for r in results if r["system"].startswith("ours") and (r.get("torn") or "absent" in r)
    ]
    if broken:
        raise SystemExit(f"{broken[0]} did not keep the state it was asked to keep")


def _line(found: dict[str, Any]) -> str:
    head = f"{found['system']:60} {found['workers']} workers, every {found['every']:>2}: "
    if "absent" in found:
        return head + f"absent ({found['absent'][:90]})"
    torn = {True: "TORN", False: "whole", None: ""}[found["torn"]]
    step = f"step {found['step_ms']:8.1f} ms ({found['ratio']:.2f} x bare, {found['x_copy']:5.1f} copies)"
    return head + (
        f"blocked {found['blocked_ms']:8.2f} ms (first {found['first_ms']:6.0f})  {step}"
        f"  {found['memory_mb']:7.0f} MB more  {found['skipped']} skipped  {torn}"
    )


if __name__ == "__main__":
    main()
