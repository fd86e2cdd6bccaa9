"""What is shown of one run: its summary, its name and aim, and the time that the picture ends at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_train.observe.finish_forecast import Forecast, forecast, recent_step_s
from elastic_train.observe.run_summary import RunSummary
from elastic_train.show.scale import Scale, duration

SILENT_S, SILENT_STEPS = 120.0, 20.0
"""A run that says nothing for longer than either may have no controller any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """`now` is in wall seconds: of a run that is over, its last record's."""

    name: str
    url: str
    told: RunSummary
    config: Mapping[str, object] = field(default_factory=dict[str, object])
    now: float | None = None

    @property
    def max_steps(self) -> int:
        found = self.config.get("max_steps", 0)
        return found if isinstance(found, int) else 0

    @property
    def silent_s(self) -> float:
        """For how long a run that isn't over has been silent, where its steps don't explain it."""
        if self.told.progress.ended is not None or self.now is None:
            return 0.0
        silent = self.now - self.told.timeline.now
        usual = SILENT_STEPS * (recent_step_s(self.told) or 0.0)
        return silent if silent > max(SILENT_S, usual) else 0.0

    @property
    def trouble(self) -> tuple[str, str] | None:
        """For how long storage has been failing, in words, and why; None where it isn't."""
        troubled = self.told.timeline.troubled
        return None if troubled is None else (duration(self.end - troubled[0]), troubled[1])

    @property
    def end(self) -> float:
        """Wall seconds at the right end of the picture."""
        line = self.told.timeline
        over = self.told.progress.ended is not None or self.now is None or self.silent_s
        return line.now if over else max(line.now, self.now or 0.0)

    @property
    def time(self) -> Scale:
        """The axis that everything on the page shares."""
        began = self.told.timeline.began
        return Scale(began, max(self.end, began + 1.0))

    @property
    def forecast(self) -> Forecast | None:
        return forecast(self.told, self.max_steps) if self.max_steps else None

    @property
    def status(self) -> str:
        """One word for what the run does now."""
        ended = self.told.progress.ended
        if ended is not None:
            return ended[0].replace("_", " ")
        if self.told.last is None:
            return "nothing yet"
        if self.silent_s:
            return "silent"
        return {"": "training", "start": "starting", "switch": "switching", "recovery": "recovering"}.get(
            self.told.account.doing, self.told.account.doing
        )
