"""The parts of a run's page beside its pictures: where it stands, what became of its time, what happened."""

from __future__ import annotations

from elastic_train.observe.journal_records import planning
from elastic_train.observe.metrics import QUANTILES
from elastic_train.observe.reconfigurations import Reconfiguration
from elastic_train.observe.save_report import saving
from elastic_train.observe.timeline import Happening
from elastic_train.planner.plan import counted
from elastic_train.show.bands import figure, said_of_time
from elastic_train.show.markup import element, table, text
from elastic_train.show.model import Shown
from elastic_train.show.scale import clock, duration, number, size

EVENTS = 200
CAUSES = {
    "start": ("start", "until the first group trained"),
    "recovery": ("recovery", "from the first sign of a failure until a group trained again"),
    "switch": ("switch", "pauses that were asked for: growth, drains, evictions"),
    "steps run again": ("again", "steps that were executed more than once"),
    "between steps": ("between", "what no step's time covers"),
    "not running": ("idle", "between an end and the next submission"),
}


def head(shown: Shown) -> str:
    progress, most = shown.told.progress, shown.max_steps
    kind = "over" if progress.ended is not None else "live"
    state = shown.status.split(" ")[0]
    done = min(1.0, progress.step / most) if most else 0.0
    parts = [
        element(
            "div",
            element("h1", text(shown.name)),
            element("span", text(shown.status), class_=f"pill {kind} {state}"),
            class_="title",
        ),
        element("p", text(shown.url), class_="quiet url"),
        element(
            "div",
            f'<i style="width:{100 * done:.2f}%"></i>',
            class_="progress",
            role="progressbar",
            aria_label="Steps",
            aria_valuenow=str(progress.step),
            aria_valuemin="0",
            aria_valuemax=str(most or progress.step),
        ),
        element("p", _where(shown), class_="where"),
    ]
    if shown.trouble is not None:
        spent, why = shown.trouble
        parts.append(element("p", text(f"Storage has been failing for {spent}: {why}"), class_="why"))
    if progress.ended is not None and progress.ended[0] not in ("finished", "stopped"):
        parts.append(element("p", text(progress.ended[1][-600:]), class_="why"))
    return "".join(parts)


def _where(shown: Shown) -> str:
    progress, most = shown.told.progress, shown.max_steps
    found = [f"step <b>{progress.step:,}</b>" + (f" of {most:,}" if most else ""), text(said_of_time(shown))]
    ahead = shown.forecast
    if ahead is not None:
        found.append(
            f"<b>{duration(ahead.expected)}</b> left "
            f"<small>({duration(ahead.earliest)} to {duration(ahead.latest)})</small>"
        )
    if shown.silent_s:
        found[-1] = f"<b>no word for {duration(shown.silent_s)}</b>: its controller may be gone"
    return " · ".join(found)


def tiles(shown: Shown) -> str:
    told, figures = shown.told, shown.told.figures
    account, group, progress = told.account.told(), told.timeline.group, told.progress
    held = figures.held_bytes()
    median = figures.step_times.quantile(QUANTILES[0])
    slow = figures.step_times.quantile(QUANTILES[-1])
    found = [
        (
            "goodput",
            f"{account.share:.1%}" if account.wall_s else "–",
            f"{duration(account.good_s)} on kept steps",
        ),
        ("loss", figure(progress.loss), f"skipped {figures.skipped}" if figures.skipped else "newest step"),
        (
            "throughput",
            figure(progress.tokens_per_s),
            f"per second · step {duration(median)}, p99 {duration(slow or 0.0)}"
            if median is not None
            else "per second",
        ),
        (
            "workers",
            str(len(group.workers)) if group is not None else "0",
            f"{group.plan}" if group is not None else "no group",
        ),
        (
            "interruptions",
            str(figures.interruptions),
            _interrupted(shown),
        ),
        (
            "last save",
            f"step {progress.saved:,}" if progress.saved is not None else "–",
            f"storage {size(figures.written)}" + (f" · memory {size(held['own'])}" if held["own"] else ""),
        ),
    ]
    return element(
        "dl",
        *(
            element(
                "div", element("dt", text(name)), element("dd", text(value), element("small", text(more)))
            )
            for name, value, more in found
        ),
        class_="tiles",
    )


def _interrupted(shown: Shown) -> str:
    figures = shown.told.figures
    if shown.told.account.doing == "recovery":
        return "one more under way" if figures.interruptions else "the first is under way"
    if not figures.interruptions:
        return "none"
    spent = duration(sum(figures.mttr_s.values()))
    return f"{spent} to recover, {counted(figures.lost, 'step')} lost"


def goodput(shown: Shown) -> str:
    account = shown.told.account.told()
    if account.wall_s <= 0:
        return element("p", "No time has passed yet.", class_="quiet")
    parts = [("kept steps", "training", "first executions of steps that are kept", account.good_s)]
    parts += [(cause, *CAUSES.get(cause, ("start", "")), spent) for cause, spent in account.badput]
    shares = [
        (name, kind, more, spent, max(0.0, spent) / account.wall_s) for name, kind, more, spent in parts
    ]
    bar = "".join(
        f'<i class="{kind}" style="flex-grow:{share:.5f}" title="{text(f"{name} {share:.1%}")}"></i>'
        for name, kind, _, _, share in shares
    )
    rows = [
        (
            f'<i class="key {kind}"></i>{text(name)}<small class="wide"> {text(more)}</small>',
            duration(spent),
            f"{share:.1%}",
        )
        for name, kind, more, spent, share in shares
    ]
    return element("div", bar, class_="stack", aria_hidden="true") + table(
        ("time on", "spent", "share"), rows, label="Goodput by cause", numbers=(1, 2)
    )


def recoveries(shown: Shown) -> str:
    figures = shown.told.figures
    if not figures.interruptions:
        said = (
            "Its first recovery is under way."
            if shown.status == "recovering"
            else "Nothing has interrupted this run."
        )
        return element("p", said, class_="quiet")
    rows = [
        (text(phase), duration(figures.mttr_s.get(phase, 0.0)), duration(figures.recovery.get(phase, 0.0)))
        for phase in ("settle", "wait", "form", "first step")
    ]
    rows.append(
        (
            "<b>recovery</b>",
            f"<b>{duration(sum(figures.mttr_s.values()))}</b>",
            duration(sum(figures.recovery.values())),
        )
    )
    account = shown.told.account
    between = (account.good_s + account.again_s) / figures.interruptions
    return table(("phase", "mean", "in all"), rows, label="Recovery by phase", numbers=(1, 2)) + element(
        "p", f"One interruption in {duration(between)} of training.", class_="quiet"
    )


def changes(shown: Shown) -> str:
    found = shown.told.changes.all[-EVENTS:]
    if not found:
        return element("p", "The group has not changed.", class_="quiet")
    return table(
        ("cause", "at step", "workers", "state from", "took", "steps lost"),
        [_change(change, over=shown.told.progress.ended is not None) for change in reversed(found)],
        label="Changes of the group",
        numbers=(1, 4, 5),
    )


def _change(change: Reconfiguration, *, over: bool) -> tuple[str, ...]:
    """`over`: what is not known by now never will be, as of a stop, after which there is no group."""
    unknown = "–" if over else "?"
    return (
        text(change.cause),
        f"{change.step:,}",
        f"{change.before} → {change.after or unknown}",
        text(change.source or unknown),
        ("–" if over else "…") if change.seconds is None else duration(change.seconds),
        str(change.lost),
    )


def events(shown: Shown) -> str:
    found = [h for h in shown.told.timeline.happenings if h.kind not in ("saved",)][-EVENTS:]
    if not found:
        return element("p", "Nothing has happened yet.", class_="quiet")
    return element(
        "ol",
        *(_event(h) for h in reversed(found)),
        class_="log",
        tabindex="0",
        role="list",
        aria_label="Events, the newest first",
    )


def _event(happening: Happening) -> str:
    when = element(
        "time", clock(happening.at), datetime=clock(happening.at, date=True).replace(" ", "T") + "Z"
    )
    kind = happening.kind.removesuffix("_over")
    said = element("span", text(happening.clause), class_="clause")
    inside = f'{when}<i class="dot k-{text(kind)}"></i>'
    if happening.reason and happening.reason != happening.clause:
        said = element(
            "details",
            element("summary", text(happening.clause)),
            element("p", text(happening.reason)),
            id=f"r{happening.number}",
        )
    return element(
        "li",
        inside,
        said,
        id=f"h{happening.number}",
        class_="over" if happening.kind.endswith("_over") else None,
    )


def ledger(shown: Shown) -> str:
    entries = shown.told.head
    if not entries:
        return element("p", "No step has been committed yet.", class_="quiet")
    rows = [
        (
            f"{e.step:,}",
            str(e.generation),
            number(e.loss),
            number(e.tokens),
            duration(e.seconds),
            f"<code>{e.ids_digest & 0xFFFFFFFF:08x}</code>",
            text(e.plan),
        )
        for e in reversed(entries)
    ]
    names = ("step", "generation", "loss", "tokens", "seconds", "samples", "plan")
    return table(names, rows, label="The newest committed steps", numbers=(0, 1, 2, 3, 4))


def reasons(shown: Shown) -> str:
    """Why the run is as it is, in the controller's own words."""
    told = shown.told
    found = [
        ("now", told.progress.reason),
        ("plan", planning(told.telling)),
        ("saves", saving(shown.config, told.telling)),
    ]
    return element(
        "dl",
        *(f"<div><dt>{text(name)}</dt><dd>{text(words)}</dd></div>" for name, words in found if words),
        class_="reasons",
    )
