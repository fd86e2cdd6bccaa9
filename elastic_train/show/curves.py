"""Loss, throughput and learning rate over the time of the run."""

from __future__ import annotations

from elastic_train.observe.bounded_series import Series
from elastic_train.show.bands import axis
from elastic_train.show.markup import element, text
from elastic_train.show.model import Shown
from elastic_train.show.scale import Scale, fitted, number, ticks
from elastic_train.show.shapes import band, line, mean, pieces, placed

WIDTH, HEIGHT = 1000.0, 100.0


def curves(shown: Shown) -> str:
    found = shown.told.timeline
    parts = [
        curve(shown, "Loss", found.loss, "loss"),
        curve(shown, "Throughput per second", found.tokens_per_s, "speed", zero=True),
        curve(shown, "Learning rate", found.rate, "rate", zero=True),
    ]
    there = [part for part in parts if part]
    if not there:
        return element("p", "No step has been committed yet.", class_="quiet")
    bottom = element(
        "div",
        element("span", "", class_="gutter"),
        element("div", axis(shown), class_="track", aria_hidden="true"),
        class_="row axis",
    )
    return "".join(there) + bottom


def curve(shown: Shown, name: str, series: Series, kind: str, *, zero: bool = False) -> str:
    """One plot; empty where there are no values."""
    buckets = series.buckets
    if not buckets:
        return ""
    y = fitted([value for b in buckets for value in (b[6], b[7])], zero=zero)
    place = placed(shown.time, y, WIDTH, HEIGHT)
    found = list(pieces(buckets, shown.told.timeline.spans))
    lines = ticks(y)
    grid = "".join(f'<path class="grid" d="M0 {(1 - y(t)) * HEIGHT:.2f}H{WIDTH:.0f}"/>' for t in lines)
    drawing = (
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none" aria-hidden="true">'
        f'{grid}<path class="band" d="{band(found, place)}"/>'
        f'<path class="line" d="{line(found, place)}"/></svg>'
    )
    least, most = min(b[6] for b in buckets), max(b[7] for b in buckets)
    first, last = mean(buckets[0]), mean(buckets[-1])
    said = (
        f"{name}: {number(first)} at step {buckets[0][2]}, {number(last)} at step {buckets[-1][3]}; "
        f"between {number(least)} and {number(most)}. Arrow keys read single values."
    )
    points = ";".join(
        f"{shown.time.percent((b[0] + b[1]) / 2):.2f},{b[3]},{number(mean(b))}" for b in buckets
    )
    labels = "".join(f'<span style="top:{100 * (1 - y(t)):.2f}%">{text(number(t))}</span>' for t in lines)
    head = element(
        "div",
        element("h3", text(name)),
        element("output", f"{text(number(last))} <small>at step {buckets[-1][3]}</small>", class_="read"),
        class_="plothead",
    )
    plot = element(
        "div",
        element("span", labels, class_="gutter values", aria_hidden="true"),
        element(
            "div",
            drawing,
            class_=f"track plot {kind}",
            tabindex="0",
            role="group",
            aria_label=said,
            data_points=points,
        ),
        class_="row",
    )
    return element("div", head, plot, class_="curve")


def spark(
    series: Series, x: Scale, y: Scale, *, by_step: bool, width: float = 240.0, height: float = 48.0
) -> str:
    """The path of a small curve, by step or by time."""
    points = [
        f"{x(float(b[3] if by_step else b[1])) * width:.1f} {(1 - y(mean(b))) * height:.1f}"
        for b in series.buckets
    ]
    return "M" + "L".join(points) if points else ""
