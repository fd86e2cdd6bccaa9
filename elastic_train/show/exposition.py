"""The metrics of runs as the text that Prometheus scrapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from elastic_train.observe.metrics import METRICS, PREFIX, Metric, samples
from elastic_train.show.model import Shown

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(runs: Iterable[Shown]) -> bytes:
    """All metrics of all runs, each with the label `run`: its name, or its place where two have one name."""
    told = tuple(runs)
    times = Counter(shown.name for shown in told)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Runs({shown.name if times[shown.name] == 1 else shown.url: shown for shown in told}))
    return generate_latest(registry)


class _Runs(Collector):
    def __init__(self, runs: Mapping[str, Shown]) -> None:
        self._runs = runs

    def collect(self) -> Iterator[Family]:
        for metric in METRICS:
            yield _family(metric, self._runs)


def _family(metric: Metric, runs: Mapping[str, Shown]) -> Family:
    name = PREFIX + metric.name
    family = Family(
        name.removesuffix("_total") if metric.kind == "counter" else name, metric.help, metric.kind
    )
    for run, shown in runs.items():
        for labels, value in samples(metric, shown.told, shown.max_steps):
            said = {"run": run, **dict(zip(metric.labels, labels, strict=True))}
            suffix = ""
            if metric.kind == "summary" and labels[0] in ("count", "sum"):
                suffix = f"_{labels[0]}"
                del said[metric.labels[0]]
            family.add_sample(name + suffix, said, value)
    return family
