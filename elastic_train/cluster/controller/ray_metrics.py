"""Export a run's metrics through Ray's metrics agents."""

from __future__ import annotations

import time

from ray.util.metrics import Counter, Gauge

from elastic_train.observe.metrics import METRICS, PREFIX, Labels, Metric, samples
from elastic_train.observe.run_summary import RunSummary

EVERY_S = 5.0
OF_A_SUMMARY = ("count", "sum")
"""What a summary has beside its quantiles. Ray has no summaries: the quantiles become a gauge."""


class RayMetrics:
    """Belongs to the deciding thread: the summary does."""

    def __init__(self, run: str, max_steps: int) -> None:
        self._run, self._max_steps = run, max_steps
        self._made = {metric.name: _made(metric) for metric in METRICS}
        self._told: dict[tuple[str, Labels], float] = {}
        self._at = -EVERY_S

    def put(self, told: RunSummary) -> None:
        """Tell the present values, but not more often than every few seconds."""
        if time.monotonic() - self._at < EVERY_S and told.progress.ended is None:
            return
        self._at = time.monotonic()
        new = {
            (metric.name, labels): value
            for metric in METRICS
            for labels, value in samples(metric, told, self._max_steps)
            if metric.kind != "summary" or labels[0] not in OF_A_SUMMARY
        }
        gone = {key: 0.0 for key in self._told if key not in new}  # such as a plan that is no more
        for (name, labels), value in {**new, **gone}.items():
            self._tell(name, labels, value)
        self._told = new

    def _tell(self, name: str, labels: Labels, value: float) -> None:
        metric, instrument = BY_NAME[name], self._made[name]
        tags = {"run": self._run, **dict(zip(metric.labels, labels, strict=True))}
        if isinstance(instrument, Gauge):
            instrument.set(value, tags)
        elif (more := value - self._told.get((name, labels), 0.0)) > 0:
            instrument.inc(more, tags)


BY_NAME = {metric.name: metric for metric in METRICS}


def _made(metric: Metric) -> Counter | Gauge:
    kind = Counter if metric.kind == "counter" else Gauge
    return kind(PREFIX + metric.name.removesuffix("_total"), metric.help, ("run", *metric.labels))
