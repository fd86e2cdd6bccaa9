"""How long do a report of a long run and its page take, and how large is it?

python -m benchmarks.report [--steps N] [--restarts N] [--stride N]

A synthetic journal of a run of N steps, with restarts evenly spread, is folded as its controller folds it. In
storage are the state that the controller keeps, and up to RECORDS records after it in parts of ten. `ratio`
is the time of the report by that of a run of two times RECORDS steps. `page` is from the start of
`elastic-train ui` to the last byte of its first page. With a stride only every so many steps are in the part
that the state covers, which the report does not read: what it holds is bounded, so it is much the same.
"""

from __future__ import annotations

import argparse
import math
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.cli.report_and_ui import write_report
from elastic_train.cluster.controller.chronicle import RECORDS
from elastic_train.control.events import GroupReady, StepCommitted
from elastic_train.control.fault_schedule import FaultSchedule, KillNode, Moment
from elastic_train.observe.journal_records import Record, to_json, wall_text
from elastic_train.observe.run_summary import RunSummary, encode_summary
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.journal import Journal
from elastic_train.testing.simulator import Simulation, simulated_policy

STEP_S, PART = 0.5, 10


def journal_of(steps: int, restarts: int, stride: int = 1) -> Iterator[Record]:
    """The records of a simulated incident again and again, with many steps between them. All of the last
    RECORDS steps are there.
    """
    simulation = Simulation(
        policy=simulated_policy(max_steps=15),
        schedule=FaultSchedule(faults=(KillNode(when=Moment(step=8), node="b"),), seed=1),
        records=[],
    )
    simulation.run()
    found = simulation.records or []
    first = next(n for n, r in enumerate(found) if isinstance(r.event, StepCommitted))
    again = next(n for n, r in enumerate(found) if isinstance(r.event, GroupReady) and n > first)
    broke = next(n for n, r in enumerate(found) if n > first and r.phase not in ("running",))
    example = found[first]
    step, at, generation = 0, 1.6e9, 1
    for record in found[:first]:
        yield replace(record, wall=wall_text(at + record.seconds))
    each = max(1, steps // (restarts + 1))
    while step < steps:
        until = min(step + each, steps)
        while step < until:
            more = min(stride if step < steps - RECORDS else 1, until - step)
            step, at = step + more, at + more * STEP_S
            loss = 2.0 + 5.0 * math.exp(-step / steps * 5) + 0.05 * math.sin(step)
            yield _step(example, step, generation, loss, at)
        if step < steps:
            generation += 1
            began = found[broke].seconds
            for record in found[broke : again + 1]:
                yield _moved(record, at + record.seconds - began, step, generation)
            at += found[again].seconds - began


def _step(example: Record, step: int, generation: int, loss: float, at: float) -> Record:
    event = example.event
    assert isinstance(event, StepCommitted)
    new = replace(event, step=step, generation=generation, loss=loss, seconds=STEP_S, rates=(1e-4,))
    return replace(example, event=new, wall=wall_text(at))


def _moved(record: Record, at: float, step: int, generation: int) -> Record:
    """A record of the incident at another time, step and generation."""
    event, formed = record.event, record.formed
    if isinstance(event, GroupReady):
        event = replace(event, step=step, generation=generation)
    if formed is not None:
        formed = replace(formed, step=step, generation=generation)
    return replace(record, event=event, formed=formed, wall=wall_text(at))


def opened(run: Path) -> float:
    """Seconds from the start of the command to a whole page."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    began = time.perf_counter()
    command = [str(Path(sys.executable).parent / "elastic-train"), "ui", str(run), "--port", str(port)]
    page = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
                    answer.read()
                return time.perf_counter() - began
            except urllib.error.URLError:
                assert page.poll() is None
                time.sleep(0.02)
    finally:
        page.terminate()
        page.wait()


def measured(
    directory: Path, steps: int, restarts: int, stride: int = 1
) -> tuple[float, float, float, float, int, int]:
    """Seconds to fold a record, to write the report, of that on a core, and to open the page; bytes of the
    kept summary and of the report.
    """
    store = open_store(str(directory / "run"))
    RunDirectory(store).create({"max_steps": steps}, {})
    journal, told = Journal(store, 1), RunSummary()
    journal.begin()
    tail: list[Record] = []
    began, count = time.perf_counter(), 0
    for record in journal_of(steps, restarts, stride):
        count += 1
        if told.progress.step < steps - RECORDS:
            told.add(record)
        else:
            tail.append(record)
    folded = (time.perf_counter() - began) / count
    said = encode_summary(told)
    journal.keep({"summary": said})
    for number, record in enumerate(tail):
        journal.append(to_json(record))
        if number % PART == 0:
            journal.flush()
    journal.flush()
    out = directory / "report.html"
    began, worked = time.perf_counter(), time.process_time()
    write_report(str(directory / "run"), str(out), form="html")
    spent, worked = time.perf_counter() - began, time.process_time() - worked
    kept = max(path.stat().st_size for path in (directory / "run" / "journal").glob("state-*"))
    return folded, spent, worked, opened(directory / "run"), kept, out.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--restarts", type=int, default=500)
    parser.add_argument("--stride", type=int, default=1)
    asked = parser.parse_args()
    rows = []
    for steps, restarts, stride in ((2 * RECORDS, 2, 1), (asked.steps, asked.restarts, asked.stride)):
        with tempfile.TemporaryDirectory() as directory:
            rows.append((steps, restarts, *measured(Path(directory), steps, restarts, stride)))
    print("steps  restarts  fold of a record  report  on a core  ratio  page  kept summary  report's size")
    for steps, restarts, folded, spent, worked, page, kept, size in rows:
        print(
            f"{steps:,}  {restarts}  {folded * 1e6:.0f} us  {spent:.2f} s  {worked:.2f} s  "
            f"{spent / rows[0][3]:.2f}  {page:.2f} s  {kept / 1e3:.0f} kB  {size / 1e3:.0f} kB"
        )


if __name__ == "__main__":
    main()
