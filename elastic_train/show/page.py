"""The page of a run: the same for a report in a file and for a page that is served, which is alive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.resources import files

from elastic_train.show import bands, curves, sections
from elastic_train.show.markup import element, text
from elastic_train.show.model import Shown

PARTS: Mapping[str, tuple[str, Callable[[Shown], str]]] = {
    "head": ("", sections.head),
    "tiles": ("", sections.tiles),
    "timeline": ("Timeline", bands.timeline),
    "curves": ("Curves", curves.curves),
    "goodput": ("Where the time went", sections.goodput),
    "recovery": ("Recovery by phase", sections.recoveries),
    "changes": ("Changes of the group", sections.changes),
    "events": ("Events", sections.events),
    "ledger": ("Newest steps", sections.ledger),
    "reasons": ("Why it is so", sections.reasons),
}
"""The sections, in their order: a heading and what is in it."""


def fragments(shown: Shown) -> dict[str, str]:
    """The inside of each section, as HTML."""
    return {name: make(shown) for name, (_, make) in PARTS.items()}


def page(shown: Shown, *, stream: str = "", back: str = "") -> str:
    """The whole document. With a `stream` of server-sent events it stays up to date by it; `back` leads to
    the other runs.
    """
    inside = fragments(shown)
    body = "".join(_section(name, title, inside[name]) for name, (title, _) in PARTS.items())
    return document(shown.name, body, stream=stream, back=back)


def document(title: str, body: str, *, stream: str = "", back: str = "") -> str:
    """A self-contained document: it loads nothing."""
    bar = element("span", "elastic_train", class_="brand")
    if back:
        bar += f'<a href="{text(back)}">all runs</a>'
    if stream:
        bar += '<span id="pulse" role="status">connecting</span>'
    bar += '<button id="theme" type="button">dark or light</button>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{text(title)}</title><style>{asset('page.css')}</style></head>"
        f'<body><header class="bar">{bar}</header><main id="main" data-stream="{text(stream)}">{body}</main>'
        f"<script>{asset('page.js')}</script></body></html>"
    )


def asset(name: str) -> str:
    return files("elastic_train.show").joinpath(name).read_text(encoding="utf-8")


def _section(name: str, title: str, inside: str) -> str:
    heading = element("h2", text(title), id=f"t-{name}") if title else ""
    label = {"aria_labelledby": f"t-{name}"} if title else {"aria_label": name}
    return element(
        "section", heading, element("div", inside, id=f"s-{name}", class_="inside"), class_=name, **label
    )
