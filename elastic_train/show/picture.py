"""The timeline of a run as one SVG file, for a README: it needs no page around it, and is light or dark."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_train.observe.bounded_series import Series
from elastic_train.observe.timeline import OPEN, Happening
from elastic_train.planner.plan import counted
from elastic_train.show.bands import DOING, SIGNS
from elastic_train.show.markup import text
from elastic_train.show.model import Shown
from elastic_train.show.scale import duration, fitted, number, time_ticks
from elastic_train.show.shapes import band, line, mean, pieces, placed

LEFT, WIDTH, RIGHT = 96.0, 860.0, 24.0
LANE, CURVE = 22.0, 78.0
MOST_LANES = 24
STYLE = """
svg{--bg:#fff;--ink:#1b2126;--quiet:#59636c;--track:#f0f0ec;--training:#1f7a68;--start:#9aa5ad;--recovery:#c2402a;
--switch:#d08a1d;--idle:#dcdcd6;--standby:#8fb4d9;--leaving:#e3a84a;--accent:#1f5fa8;--edge:#e2e3de;
font:12px system-ui,"Segoe UI","DejaVu Sans",sans-serif}
@media(prefers-color-scheme:dark){svg{--bg:#1c2226;--ink:#e8ebec;--quiet:#a3adb4;--track:#252c31;--training:#45b39d;
--start:#77838b;--recovery:#ef6a52;--switch:#e5a743;--idle:#333b41;--standby:#5b8fc4;--leaving:#d99a3a;
--accent:#7fb2ea;--edge:#2d353a}}
text{fill:var(--quiet)}.b{fill:var(--ink);font-weight:600}.h{font-size:17px}.e{text-anchor:end}.m{text-anchor:middle}
.training,.on-training{fill:var(--training)}.start{fill:var(--start)}.recovery{fill:var(--recovery)}
.switch{fill:var(--switch)}.idle{fill:var(--idle)}.on-standby{fill:var(--standby)}.on-leaving{fill:var(--leaving)}
.track{fill:var(--track)}.save{fill:var(--accent)}.curve{fill:none;stroke:var(--accent);stroke-width:1.8;
stroke-linejoin:round}.speed{stroke:var(--training)}.area{fill:var(--accent);opacity:.18}.edge{stroke:var(--edge)}
.kill{fill:#b3341f}.join{fill:#1c5c9c}.drain{fill:#8a5600}.sign{fill:#fff;font-weight:700;font-size:11px}
"""


def picture(shown: Shown) -> str:
    """An SVG document."""
    rows, height = _rows(shown)
    whole = LEFT + WIDTH + RIGHT
    said = f"Timeline of the run {shown.name}: {_summary(shown)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole:.0f} {height:.0f}" width="{whole:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{text(said)}"><title>{text(said)}</title>'
        f"<style>{STYLE}</style>"
        f'<rect width="100%" height="100%" rx="10" style="fill:var(--bg)"/>{rows}</svg>\n'
    )


def _summary(shown: Shown) -> str:
    told = shown.told
    account = told.account.told()
    figures = told.figures
    many = counted(figures.interruptions, "interruption")
    steps = f"{counted(figures.lost, 'step')} lost"
    begin = f"{counted(told.progress.step, 'step')} in {duration(account.wall_s)}"
    return f"{begin}, goodput {account.share:.0%}, {many}, {steps}"


def _rows(shown: Shown) -> tuple[str, float]:
    line_ = shown.told.timeline
    parts = [
        f'<text class="b h" x="20" y="32">{text(shown.name)}</text>',
        f'<text class="e" x="{LEFT + WIDTH:.0f}" y="32">{text(_summary(shown))}</text>',
    ]
    y = 52.0
    parts.append(_track("run", y))
    for span in line_.spans:
        ended = shown.end if span is line_.spans[-1] else span.ended
        parts.append(_bar(shown, span.began, ended, y + 2, 14, DOING.get(span.doing, "start")))
    lanes = line_.lanes[:MOST_LANES]
    for lane in lanes:
        y += LANE
        parts.append(_track(lane.node, y))
        for s in lane.stretches:
            parts.append(
                _bar(shown, s.began, shown.end if s.ended == OPEN else s.ended, y + 3, 12, f"on-{s.status}")
            )
        parts += _signs(shown, lane.node, y + 9)
    y += LANE
    parts.append(_track("saves", y))
    parts += [
        f'<rect class="save" x="{_x(shown, b[0]):.1f}" y="{y + 3:.0f}" width="3" height="12" rx="1"/>'
        for b in line_.saves.buckets
    ]
    y += LANE + 10
    for name, series, kind, zero in (
        ("loss", line_.loss, "", False),
        ("throughput", line_.tokens_per_s, "speed", True),
    ):
        if series.buckets:
            parts.append(_curve(shown, name, series, y, kind, zero=zero))
            y += CURVE + 12
    parts.append(_axis(shown, y))
    return "".join(parts), y + 30


def _x(shown: Shown, seconds: float) -> float:
    return LEFT + WIDTH * shown.time(seconds)


def _track(name: str, y: float) -> str:
    return (
        f'<text class="e" x="{LEFT - 10:.0f}" y="{y + 13:.0f}">{text(name[:12])}</text>'
        f'<rect class="track" x="{LEFT:.0f}" y="{y:.0f}" width="{WIDTH:.0f}" height="18" rx="4"/>'
    )


def _bar(shown: Shown, began: float, ended: float, y: float, height: float, kind: str) -> str:
    left = _x(shown, began)
    width = max(_x(shown, ended) - left, 1.5)
    return (
        f'<rect class="{kind}" x="{left:.1f}" y="{y:.0f}" width="{width:.1f}" height="{height:.0f}" rx="2"/>'
    )


def _signs(shown: Shown, node: str, y: float) -> Iterator[str]:
    for happening in shown.told.timeline.happenings:
        if node in happening.nodes and happening.kind in SIGNS and not _founding(shown, happening):
            kind, sign = SIGNS[happening.kind]
            x = _x(shown, happening.at)
            yield (
                f"<g><title>{text(happening.clause)}</title>"
                f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.0f}" r="8"/>'
                f'<text class="sign m" x="{x:.1f}" y="{y + 4:.0f}">{sign}</text></g>'
            )


def _founding(shown: Shown, happening: Happening) -> bool:
    return happening.kind == "joined" and happening.at <= shown.told.timeline.spans[0].ended


def _curve(shown: Shown, name: str, series: Series, top: float, kind: str, *, zero: bool) -> str:
    y = fitted([value for b in series.buckets for value in (b[6], b[7])], zero=zero)
    place = placed(shown.time, y, WIDTH, CURVE)
    found = list(pieces(series.buckets, shown.told.timeline.spans))
    last = number(mean(series.buckets[-1]))
    return (
        f'<text class="e" x="{LEFT - 10:.0f}" y="{top + CURVE / 2:.0f}">{text(name)}</text>'
        f'<text class="e b" x="{LEFT - 10:.0f}" y="{top + CURVE / 2 + 16:.0f}">{text(last)}</text>'
        f'<g transform="translate({LEFT:.0f} {top:.0f})"><path class="edge" d="M0 {CURVE:.0f}H{WIDTH:.0f}"/>'
        f'<path class="area" d="{band(found, place)}"/>'
        f'<path class="curve {kind}" d="{line(found, place)}"/></g>'
    )


def _axis(shown: Shown, y: float) -> str:
    whole = shown.time.high - shown.time.low
    return "".join(
        f'<text class="m" x="{LEFT + WIDTH * at / whole:.1f}" y="{y + 10:.0f}">{duration(at)}</text>'
        for at in time_ticks(whole)
    )
