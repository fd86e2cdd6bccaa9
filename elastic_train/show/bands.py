"""The timeline: what the run did, its world size, a lane for each node, its saves, on one axis of time."""

from __future__ import annotations

from collections.abc import Iterable

from elastic_train.observe.bounded_series import Bucket
from elastic_train.observe.timeline import OPEN, Happening, NodeLane
from elastic_train.planner.plan import counted, on_nodes
from elastic_train.show.markup import element, text
from elastic_train.show.model import Shown
from elastic_train.show.scale import clock, duration, number, size, time_ticks

SIGNS = {
    "node_lost": ("kill", "✕"),
    "worker_lost": ("kill", "✕"),
    "silence": ("kill", "✕"),
    "hang": ("kill", "✕"),
    "out_of_memory": ("kill", "✕"),
    "corruption": ("kill", "✕"),
    "user_error": ("kill", "✕"),
    "joined": ("join", "+"),
    "notice": ("drain", "!"),
    "drain": ("drain", "↓"),
    "eviction": ("drain", "↓"),
    "shrink": ("drain", "↓"),
    "straggling": ("drain", "~"),
}
"""The sign of each kind of happening on a node's lane."""
DOING = {
    "training": "training",
    "start": "start",
    "recovery": "recovery",
    "switch": "switch",
    "not running": "idle",
}


def timeline(shown: Shown) -> str:
    line = shown.told.timeline
    if not line.spans:
        return element("p", "Nothing has happened yet.", class_="quiet")
    costs = _costs(line.happenings)
    rows = [
        _row("run", _spans(shown), "What the run did, from its submission to now"),
        _row("workers", _workers(shown), "World size over time"),
    ]
    lanes = "".join(
        _row(lane.node, _lane(shown, lane, costs), f"Node {lane.node}", "lane") for lane in line.lanes
    )
    more = (
        element("p", f"Not shown, since they went earlier: {counted(line.given_up, 'node')}.", class_="quiet")
        if line.given_up
        else ""
    )
    rows += [
        element(
            "div",
            lanes,
            class_="lanes",
            tabindex="0",
            role="group",
            aria_label=f"{counted(len(line.lanes), 'node')}, one lane each",
        )
        + more,
        _row(
            "storage",
            _saves(shown, line.saves.buckets, "save"),
            counted(shown.told.figures.checkpoints, "checkpoint"),
        ),
    ]
    if line.snapshots.buckets:
        rows.append(_row("memory", _saves(shown, line.snapshots.buckets, "snap"), "Snapshots in peer memory"))
    if line.trouble:
        rows.append(_row("trouble", _trouble(shown), "Storage trouble"))
    rows.append(_row("", axis(shown), "", "axis"))
    return element("div", *rows, class_="bands") + legend()


def _row(name: str, inside: str, label: str, kind: str = "") -> str:
    head = element("span", text(name), class_="gutter", title=name)
    role = {"role": "group", "aria_label": label} if label else {"aria_hidden": "true"}
    return element("div", head, element("div", inside, class_="track", **role), class_=f"row {kind}".strip())


def _bar(shown: Shown, began: float, ended: float, kind: str, title: str) -> str:
    left = shown.time.percent(began)
    width = max(shown.time.percent(shown.end if ended == OPEN else ended) - left, 0.15)
    return f'<i class="seg {kind}" style="left:{left}%;width:{width:.3f}%" title="{text(title)}"></i>'


def _spans(shown: Shown) -> str:
    spans = shown.told.timeline.spans
    return "".join(
        _bar(
            shown,
            span.began,
            shown.end if span is spans[-1] else span.ended,
            DOING.get(span.doing, "start"),
            f"{span.doing}, {duration((shown.end if span is spans[-1] else span.ended) - span.began)}"
            + (f": {span.plan} {on_nodes(span.nodes)}" if span.plan else ""),
        )
        for span in spans
    )


def _workers(shown: Shown) -> str:
    """Heights are relative to the largest group; the number stands where there is room for it."""
    spans = shown.told.timeline.spans
    most = max((span.workers for span in spans), default=0) or 1
    merged: list[tuple[float, float, int, str]] = []
    for span in spans:
        ended = shown.end if span is spans[-1] else span.ended
        workers = span.workers if span.doing in ("training", "switch") else 0
        if merged and merged[-1][2:] == (workers, span.plan):
            merged[-1] = (merged[-1][0], ended, workers, span.plan)
        else:
            merged.append((span.began, ended, workers, span.plan))
    return "".join(_size(shown, *one, most) for one in merged if one[2])


def _size(shown: Shown, began: float, ended: float, workers: int, plan: str, most: int) -> str:
    left, right = shown.time.percent(began), shown.time.percent(ended)
    name = f"{workers} · {plan}" if right - left > 22 else f"{workers}" if right - left > 3 else ""
    place = f"left:{left}%;width:{max(right - left, 0.15):.3f}%;height:{100 * workers / most:.0f}%"
    title = text(f"{counted(workers, 'worker')}, {plan}")
    return f'<i class="size" style="{place}" title="{title}"><b>{text(name)}</b></i>'


def _costs(happenings: Iterable[Happening]) -> dict[int, Happening]:
    """What became of each change: the end that followed it."""
    found: dict[int, Happening] = {}
    waiting: list[int] = []
    for happening in happenings:
        if happening.kind.endswith("_over"):
            found.update(dict.fromkeys(waiting, happening))
            waiting = []
        elif happening.kind in SIGNS and happening.kind != "joined":
            waiting.append(happening.number)
    return found


def _lane(shown: Shown, lane: NodeLane, costs: dict[int, Happening]) -> str:
    bars = "".join(
        _bar(shown, s.began, s.ended, f"on-{s.status}", f"{lane.node} {s.status} from {clock(s.began)}")
        for s in lane.stretches
    )
    marks: list[str] = []
    first = bool(lane.stretches) and lane.stretches[0].began <= shown.told.timeline.spans[0].ended
    for happening in shown.told.timeline.happenings:
        if lane.node not in happening.nodes or happening.kind not in SIGNS:
            continue
        if happening.kind == "joined" and happening.at <= (lane.stretches[0].began if first else -1.0):
            continue  # it was there from the start
        kind, sign = SIGNS[happening.kind]
        cost = costs.get(happening.number)
        said = happening.clause
        if cost is not None and cost.seconds is not None:
            said += f"; cost {duration(cost.seconds)} and {counted(cost.lost, 'step')}"
        place = f"left:{shown.time.percent(happening.at)}%"
        marks.append(
            element(
                "a",
                sign,
                class_=f"mark {kind}",
                href=f"#h{happening.number}",
                style=place,
                title=said,
                aria_label=said,
            )
        )
    return bars + "".join(marks)


def _saves(shown: Shown, buckets: Iterable[Bucket], kind: str) -> str:
    found: list[str] = []
    for began, ended, first, last, count, total, *_ in buckets:
        what = f"step {last}" if count == 1 else f"{count} from step {first} to {last}"
        left = shown.time.percent(began)
        width = shown.time.percent(ended) - left
        found.append(
            f'<i class="{kind}" style="left:{left}%;width:max(3px,{width:.3f}%)" '
            f'title="{text(f"{what}, {size(total / count)}")}"></i>'
        )
    return "".join(found)


def _trouble(shown: Shown) -> str:
    return "".join(
        _bar(shown, began, ended, "trouble", why) for began, ended, why in shown.told.timeline.trouble
    )


def axis(shown: Shown) -> str:
    """Time since the run was submitted."""
    whole = shown.time.high - shown.time.low
    found: list[str] = []
    for at in time_ticks(whole):
        left = 100 * at / whole
        side = ' class="end"' if left > 94 else ""
        found.append(f'<span{side} style="left:{left:.3f}%">{duration(at)}</span>')
    return "".join(found)


def legend() -> str:
    names = (
        ("training", "training"),
        ("start", "start"),
        ("recovery", "recovery"),
        ("switch", "planned switch"),
        ("idle", "not running"),
        ("on-standby", "standby"),
        ("on-leaving", "leaving"),
    )
    signs = (
        ("kill", "✕", "lost"),
        ("join", "+", "joined"),
        ("drain", "!", "notice"),
        ("drain", "↓", "drained or evicted"),
        ("drain", "~", "slow, or no more"),
    )
    items = [f'<li><i class="key {kind}"></i>{text(name)}</li>' for kind, name in names]
    items += [f'<li><span class="mark {kind}">{sign}</span>{text(name)}</li>' for kind, sign, name in signs]
    items += ['<li><i class="key save"></i>checkpoint</li>', '<li><i class="key snap"></i>snapshot</li>']
    return element("ul", *items, class_="legend", aria_label="Legend")


def said_of_time(shown: Shown) -> str:
    """When it began and how long it has been, for people."""
    line = shown.told.timeline
    return f"since {clock(line.began, date=True)} UTC, {duration(shown.end - line.began)}"


def figure(value: float | None) -> str:
    return "–" if value is None else number(value)
