"""Terminal output of the driver: one live line, and a line for each notable event."""

from __future__ import annotations

import sys
import time

from elastic_train.cluster.run_updates import RunUpdate
from elastic_train.config import Prints, RunSpec
from elastic_train.control.events import (
    CheckpointCommitted,
    FinalReport,
    GroupReady,
    NodesChanged,
    PartWritten,
    StepCommitted,
)
from elastic_train.errors import StorageError
from elastic_train.observe.best import best
from elastic_train.observe.goodput import words
from elastic_train.observe.history import table
from elastic_train.observe.records import Record
from elastic_train.observe.run_summary import RunSummary
from elastic_train.observe.status_numbers import live_line
from elastic_train.observe.text_columns import columns, plain
from elastic_train.storage.fsspec_store import child_url
from elastic_train.storage.job_output import OutputReader, output_text

QUIET_EVENTS = (StepCommitted, PartWritten, FinalReport, CheckpointCommitted)
OUTPUT_S = 2.0  # between two looks at what the job printed
EVERY_S = 5.0  # between two progress lines where the output is no terminal


class Screen:
    """Prints to stdout; on a terminal the live line is rewritten in place."""

    def __init__(
        self, spec: RunSpec, output: OutputReader, *, quiet: bool = False, prints: Prints = "none"
    ) -> None:
        self._spec, self._quiet = spec, quiet
        self._output, self._prints = output, prints
        self._looked_at = 0.0
        self._live = sys.stdout.isatty()
        self._told = RunSummary()
        self._committed: list[Record] = []
        self._shown = ""
        self._printed_at = 0.0
        if not quiet:
            self._write(f"run {child_url(spec.storage_path, spec.name)}\n")

    def show(self, update: RunUpdate) -> None:
        if time.monotonic() - self._looked_at > OUTPUT_S:
            self._show_output()
        for record in update.records:
            self._told.add(record)
            if isinstance(record.event, CheckpointCommitted):
                self._committed.append(record)
            self._say(record)
        text = live_line(self._told.progress, self._spec.max_steps)
        if text == self._shown or self._quiet or not update.records:
            return
        if self._live:
            self._write(f"\r\x1b[K{text}")
        elif time.monotonic() - self._printed_at > EVERY_S:
            self._printed_at = time.monotonic()
            self._write(text + "\n")
        self._shown = text

    def close(self) -> None:
        """Say where the run stands at its end, what became of its time, and what happened on the way."""
        self._show_output(every=True)
        if self._quiet:
            return
        start = "\r\x1b[K" if self._live else ""
        if self._prints == "none" and self._printed():
            url = child_url(self._spec.storage_path, self._spec.name)
            self._write(f"{start}what its workers printed: elastic-train logs {url}\n")
        self._write(f"{start}{live_line(self._told.progress, self._spec.max_steps)}\n")
        if self._told.progress.groups:
            self._write(f"{words(self._told.account.told())}\n")
        if found := best(self._committed, self._spec.checkpoints):
            self._write(f"{found}\n")
        if self._told.progress.restarts:
            self._write(f"{self.summary()}\n")

    def _show_output(self, *, every: bool = False) -> None:
        """What the job printed, of all ranks or of the first. Storage that fails is looked at again later."""
        self._looked_at = time.monotonic()
        if self._prints == "none":
            return
        try:
            lines = self._output.new(every=every)
        except StorageError:
            return
        start = "\r\x1b[K" if self._live else ""
        for told in lines:
            if self._prints == "all" or told.rank <= 0:
                self._write(f"{start}{plain(output_text(told).expandtabs())}\n")
        self._shown = "" if lines else self._shown

    def _printed(self) -> bool:
        try:
            return self._output.any()
        except StorageError:
            return False

    def summary(self) -> str:
        """Every change of the group: cause, step, workers, source, seconds, steps lost."""
        return columns(table(self._told.changes.all))

    def _say(self, record: Record) -> None:
        worth = record.commands or isinstance(record.event, GroupReady | NodesChanged)
        often = isinstance(record.event, QUIET_EVENTS) and record.ended is None
        if (
            isinstance(record.event, StepCommitted)
            and record.event.skipped
            and self._told.progress.skips == 1
        ):
            worth, often = True, False  # the first one; the line counts them
        if self._quiet or not worth or often:
            return
        start = "\r\x1b[K" if self._live else ""
        self._write(f"{start}[{record.wall[11:19]}] {plain(record.reason)}\n")
        self._shown = ""

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
