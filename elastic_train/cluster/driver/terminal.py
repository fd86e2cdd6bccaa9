"""Driver output: a live display in a terminal, lines elsewhere, a clause for each event."""

from __future__ import annotations

import sys
import time

from elastic_train.cluster.driver.live_display import Display
from elastic_train.cluster.driver.run_activity import doing, storage_failing
from elastic_train.cluster.run_updates import RunUpdate
from elastic_train.config import Prints, RunSpec
from elastic_train.control.events import CheckpointCommitted
from elastic_train.errors import StorageError
from elastic_train.observe.best_checkpoint import best
from elastic_train.observe.event_text import place_in_page
from elastic_train.observe.goodput import words
from elastic_train.observe.journal_records import Record, wall_text
from elastic_train.observe.reconfigurations import table
from elastic_train.observe.run_summary import RunSummary
from elastic_train.observe.status_numbers import live_line
from elastic_train.observe.text_columns import columns, plain
from elastic_train.observe.timeline import MINOR
from elastic_train.storage.fsspec_store import child_url
from elastic_train.storage.job_output import OutputReader, output_text

OUTPUT_S = 2.0  # between two looks at what the job printed
EVERY_S = 5.0  # between two progress lines where the output is no terminal


class Screen:
    """Prints to stdout; in a terminal below a live display. `verbose` adds the whole reason to each event."""

    def __init__(
        self,
        spec: RunSpec,
        output: OutputReader,
        *,
        quiet: bool = False,
        verbose: bool = False,
        prints: Prints = "none",
    ) -> None:
        self._spec, self._quiet, self._verbose = spec, quiet, verbose
        self._output, self._prints = output, prints
        self._looked_at = 0.0
        self._told = RunSummary()
        self._said = 0  # the number of the last happening
        self._committed: list[Record] = []
        self._shown = ""
        self._printed_at = 0.0
        if not quiet:
            self._write(f"run {child_url(spec.storage_path, spec.name)}\n")
        self._display = Display(spec.name, spec.max_steps) if sys.stdout.isatty() and not quiet else None

    def show(self, update: RunUpdate) -> None:
        if time.monotonic() - self._looked_at > OUTPUT_S:
            self._show_output()
        for record in update.records:
            self._told.add(record)
            if isinstance(record.event, CheckpointCommitted):
                self._committed.append(record)
            self._say()
        if self._quiet:
            return
        does = doing(self._told, update.heartbeats, least=self._spec.min_workers)
        if self._display is not None:
            self._display.show(self._told, does)
            return
        failing = storage_failing(self._told)
        text = live_line(self._told.progress, self._spec.max_steps) + (f": {does}" if does else "")
        text += f"  {failing}" if failing else ""
        if text != self._shown and time.monotonic() - self._printed_at > EVERY_S:
            self._printed_at = time.monotonic()
            self._write(text + "\n")
            self._shown = text

    def close(self) -> None:
        """Say where the run stands at its end, what became of its time, and what happened on the way."""
        self._show_output(every=True)
        if self._display is not None:
            self._display.close()
            self._display = None
        if self._quiet:
            return
        if self._prints == "none" and self._printed():
            url = child_url(self._spec.storage_path, self._spec.name)
            self._write(f"what its workers printed: elastic-train logs {url}\n")
        if (text := live_line(self._told.progress, self._spec.max_steps)) != self._shown:
            self._write(f"{text}\n")
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
        for told in lines:
            if self._prints == "all" or told.rank <= 0:
                self._line(plain(output_text(told).expandtabs()))

    def _printed(self) -> bool:
        try:
            return self._output.any()
        except StorageError:
            return False

    def summary(self) -> str:
        """Every change of the group: cause, step, workers, source, seconds, steps lost."""
        return columns(table(self._told.changes.all))

    def _say(self) -> None:
        """A clause for what happened since."""
        for happening in self._told.timeline.since(self._said):
            self._said = happening.number
            first_skipped = happening.kind == "skipped" and self._told.progress.skips == 1
            if self._quiet or (happening.kind in MINOR and not first_skipped):
                continue
            self._line(f"[{wall_text(happening.at)[11:19]}] {plain(happening.clause)}")
            if self._verbose and happening.reason:
                self._line(f"           {plain(happening.reason)}{place_in_page(happening.entry)}")

    def _line(self, text: str) -> None:
        if self._display is not None:
            self._display.say(text)
        else:
            self._write(text + "\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
