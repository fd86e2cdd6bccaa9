"""What does the start of a controller cost as a run grows old?

python -m benchmarks.long_life [--quick] [--json FILE]

A run's storage is made as its controllers leave it: records in history files, the newest state, parts after
it, and a commit log. Then a process of its own takes the run over, as a controller does: fence, journal,
fold. The history is made of one block of records again and again, which no start reads; everything else is
written by what writes it in a run.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import record as bench
from benchmarks.control import live
from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.cluster.controller.chronicle import RECORDS, Chronicle
from elastic_train.cluster.run_reading import summary
from elastic_train.control.events import StepCommitted
from elastic_train.control.journal_codec import encode_state
from elastic_train.control.transition import transition
from elastic_train.observe.journal_records import record, to_json, wall_text
from elastic_train.observe.run_summary import RunSummary, encode_summary
from elastic_train.storage.commit_log import CommitRecord
from elastic_train.storage.compacted_journal import write_history
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.journal import Journal
from elastic_train.storage.journal_parts import Part
from elastic_train.storage.journal_reading import Covering, covering_path, encode_covering
from elastic_train.storage.store import Store
from elastic_train.testing.simulator import simulated_policy

SIZES, QUICK_SIZES = (100_000, 1_000_000, 10_000_000), (100_000,)
STEPS_OF_A_PART = 5
STEPS_OF_A_COMMIT = 1000
SLOTS = RECORDS // STEPS_OF_A_PART
"""Of a history file: those of the records between two states."""


def aged(directory: Path, steps: int) -> None:
    """The storage of a run of so many steps."""
    store = open_store(str(directory))
    run = live(8)
    generation, first = run.facts.lineage.generation, run.facts.lineage.step + 1
    outcomes = []
    for step in range(first, first + RECORDS):
        event = StepCommitted(
            at=run.at,
            generation=generation,
            step=step,
            loss=1.0,
            tokens=1e6,
            grad_norm=1.0,
            skipped=False,
            seconds=1.0,
            vote=(float(step),) * 16,
        )
        outcome = transition(run.state, event, run.policy)
        run.state = outcome.state
        outcomes.append(record(step, wall_text(1.7e9 + step), event, outcome))
    files = steps // RECORDS
    lines = [json.dumps(to_json(noted), separators=(",", ":")) for noted in outcomes]
    for number in range(files):
        slot = 1 + number * SLOTS
        parts = [
            Part(
                slot=slot + n, term=1, writer="w", lines=tuple(lines[n * STEPS_OF_A_PART :][:STEPS_OF_A_PART])
            )
            for n in range(SLOTS)
        ]
        write_history(store, slot, slot + SLOTS - 1, parts)
    log = RunDirectory(store).log
    term = log.begin_term("the run's first controller")
    for number in range(1, steps // STEPS_OF_A_COMMIT + 1):
        step = number * STEPS_OF_A_COMMIT
        path = f"checkpoints/step-{step:010d}.g{generation}"
        kept = log.append(
            CommitRecord(kind="commit", step=step, generation=generation, path=path, manifest_hash="0"), term
        )
        if number > 1:
            log.append(CommitRecord(kind="prune", removes=(kept.slot - 2 if number > 2 else 2,)), term)
    told = RunSummary()
    for noted in outcomes:
        told.add(noted)
    covered = files * SLOTS
    said = {"state": encode_state(run.state), "summary": encode_summary(told)}
    store.write(covering_path(covered), encode_covering(Covering(slot=covered, term=1, said=said)))
    journal = Journal(store, term, log=log)
    chronicle = Chronicle(store, journal, run.policy)
    chronicle.begin()
    for number, noted in enumerate(outcomes[: RECORDS // 2]):
        chronicle.note(noted, run.state)
        if number % STEPS_OF_A_PART == 0:
            journal.flush()
    journal.flush()


def start(directory: Path) -> dict[str, float]:
    """Take a run over, in this process."""
    store = open_store(str(directory))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    run = RunDirectory(store)
    term = run.begin_term("a benchmark")
    fenced = time.perf_counter()
    Chronicle(store, Journal(store, term, log=run.log), simulated_policy()).begin()
    run.newest()
    done = time.perf_counter()
    summary(store)
    return {
        "start_s": done - began,
        "commit_log_s": fenced - began,
        "status_s": time.perf_counter() - done,
        "memory_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
    }


def hot_bytes(store: Store) -> int:
    """Of the files that a start may read."""
    return sum(store.size(path) for name in ("journal", "commits") for path in store.list(name))


def measured(sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    for steps in sizes:
        with tempfile.TemporaryDirectory() as made:
            directory = Path(made) / "run"
            aged(directory, steps)
            command = [sys.executable, "-m", "benchmarks.long_life", "--start", str(directory)]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            hot = hot_bytes(open_store(str(directory)))
            yield {"steps": steps, "hot_mb": hot / 1e6} | json.loads(said)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--start"]:
        print(json.dumps(start(Path(arguments[1]))))
        return 0
    given = bench.options("What a start costs as a run grows old.").parse_args(arguments)
    results = list(measured(QUICK_SIZES if given.quick else SIZES))
    names = ["steps", "start_s", "commit_log_s", "status_s", "memory_mb", "hot_mb"]
    print(bench.table(names, [[entry[name] for name in names] for entry in results]))
    oldest = results[-1]
    headline = {"start_s_10m_steps": oldest["start_s"] if oldest["steps"] == SIZES[-1] else None}
    bench.finish(bench.record("long_life", results=results, headline=headline), given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
