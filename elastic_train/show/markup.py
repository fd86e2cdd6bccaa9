"""Pieces of HTML. Every text is escaped here: names come from files that anybody may have written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from elastic_train.observe.text_columns import plain


def text(value: object) -> str:
    """Text and attributes without anything that a browser would act on."""
    return escape(plain(str(value)), quote=True)


def element(tag: str, *inside: str, **attributes: object) -> str:
    """`inside` is HTML already; attributes are escaped. A trailing _ and inner _ of their names are `-`."""
    said = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{text(value)}"'
        for name, value in attributes.items()
        if value not in (None, False)
    )
    return f"<{tag}{said}>{''.join(inside)}</{tag}>"


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, label: str, numbers: Sequence[int] = ()
) -> str:
    """`rows` hold HTML; columns of `numbers` are set to the right."""
    side = dict.fromkeys(numbers, ' class="n"')
    top = "".join(f'<th scope="col"{side.get(n, "")}>{text(name)}</th>' for n, name in enumerate(head))
    body = "".join(
        "<tr>" + "".join(f"<td{side.get(n, '')}>{cell}</td>" for n, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{text(label)}">'
        f"<table><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )
