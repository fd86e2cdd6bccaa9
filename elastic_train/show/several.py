"""Several runs side by side: a card for each, and their losses by step in one plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from elastic_train.planner.plan import counted
from elastic_train.show.bands import figure
from elastic_train.show.curves import HEIGHT, WIDTH, spark
from elastic_train.show.markup import element, text
from elastic_train.show.model import Shown
from elastic_train.show.scale import Scale, duration, fitted, number, ticks

COLOURS = 8


def several(runs: Mapping[str, Shown]) -> dict[str, str]:
    """The inside of the page's sections; `runs` by where each has its own page."""
    times = Counter(shown.name for shown in runs.values())
    named = {
        where: shown if times[shown.name] == 1 else replace(shown, name=shown.url)
        for where, shown in runs.items()
    }  # two of one name are told apart by their places
    return {"compare": _compare(list(named.values())), "runs": _cards(named)}


def body(runs: Mapping[str, Shown]) -> str:
    inside = several(runs)
    return (
        '<section class="head" aria-label="runs"><h1>Runs</h1></section>'
        '<section class="compare" aria-labelledby="t-compare"><h2 id="t-compare">Loss by step</h2>'
        f'<div id="s-compare" class="inside">{inside["compare"]}</div></section>'
        f'<section class="tiles" aria-label="each run">'
        f'<div id="s-runs" class="inside cards">{inside["runs"]}</div></section>'
    )


def _compare(runs: list[Shown]) -> str:
    found = [shown.told.timeline.loss for shown in runs]
    buckets = [b for series in found for b in series.buckets]
    if not buckets:
        return element("p", "No step has been committed yet.", class_="quiet")
    x = Scale(0.0, float(max(b[3] for b in buckets)))
    y = fitted([b[5] / b[4] for b in buckets])
    lines = "".join(
        f'<path class="line c{n % COLOURS}" d="{spark(s, x, y, by_step=True, width=WIDTH, height=HEIGHT)}"/>'
        for n, s in enumerate(found)
    )
    grid = "".join(f'<path class="grid" d="M0 {(1 - y(t)) * HEIGHT:.2f}H{WIDTH:.0f}"/>' for t in ticks(y))
    labels = "".join(f'<span style="top:{100 * (1 - y(t)):.2f}%">{text(number(t))}</span>' for t in ticks(y))
    at = "".join(
        f'<span{" class=end" if x(t) > 0.94 else ""} style="left:{x.percent(t)}%">{number(t)}</span>'
        for t in ticks(x, 8)
    )
    names = "".join(
        f'<li><i class="key b{n % COLOURS}"></i>{text(shown.name)}</li>' for n, shown in enumerate(runs)
    )
    drawing = (
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="Loss by step of {len(runs)} runs">{grid}{lines}</svg>'
    )
    return (
        f'<div class="row"><span class="gutter values" aria-hidden="true">{labels}</span>'
        f'<div class="track plot">{drawing}</div></div>'
        f'<div class="row axis"><span class="gutter">step</span>'
        f'<div class="track" aria-hidden="true">{at}</div></div>'
        f'<ul class="legend">{names}</ul>'
    )


def _cards(runs: Mapping[str, Shown]) -> str:
    return "".join(_card(shown, where) for where, shown in runs.items())


def _card(shown: Shown, where: str) -> str:
    told = shown.told
    series, account = told.timeline.loss, told.account.told()
    x, y = shown.time, fitted([b[5] / b[4] for b in series.buckets])
    drawing = (
        '<svg viewBox="0 0 240 48" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="line" d="{spark(series, x, y, by_step=False)}"/></svg>'
    )
    state = shown.status.split(" ")[0]
    most = f" of {shown.max_steps:,}" if shown.max_steps else ""
    trouble = shown.trouble
    failing = "" if trouble is None else f'<p class="why">storage failing for {trouble[0]}</p>'
    workers = len(told.timeline.group.workers) if told.timeline.group is not None else 0
    return (
        f'<a class="card" href="{text(where)}"><div class="title"><h2>{text(shown.name)}</h2>'
        f'<span class="pill {text(state)}">{text(shown.status)}</span></div>{drawing}'
        f"<p>step <b>{told.progress.step:,}</b>{most} · loss <b>{figure(told.progress.loss)}</b></p>"
        f'<p class="quiet">goodput {account.share:.0%} · {counted(workers, "worker")} · '
        f"{counted(told.figures.interruptions, 'interruption')} · {duration(account.wall_s)}</p>{failing}</a>"
    )
