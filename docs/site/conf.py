"""How Sphinx makes a site of the pages: `make docs`. Its source is the repository, as pages link into it."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
project = "elastic_train"
copyright = "the authors, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/README"
include_patterns = ["*.md", "docs/*.md", "benchmarks/results/*.md"]
html_theme = "furo"
html_title = "elastic_train"
html_show_sphinx = False
html_copy_source = False
myst_heading_anchors = 4
autodoc_member_order = "bysource"
suppress_warnings = ["misc.highlighting_failure"]  # `...` in a diff, a line of JSON cut short

LINK = re.compile(r"(?<!`)\[([^\]\n]+)\]\(([^)\s]+)\)")
PLACE = re.compile(r'^<a id="(.+?)"></a>$', re.MULTILINE)
TREE = re.compile(r"^(?:\|   |    )*[|`]-- ", re.MULTILINE)


def _pages(app: Any, page: str, source: list[str]) -> None:
    """A page as the site has it: no links to files that are no pages; the index says the order."""

    def plain(found: re.Match[str]) -> str:
        words, target = found.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target.partition("#")[0]))
        there = ROOT / path
        if "://" in target or there.suffix in (".md", ".svg") or not there.exists():
            return found[0]
        return f"`{path}`" if words.strip("`") == path else f"{words} (`{path}`)"

    text = PLACE.sub(r"(\1)=", LINK.sub(plain, source[0]))
    if page == root_doc:
        named = [target.partition("#")[0] for _, target in LINK.findall(text) if ".md" in target]
        others = sorted(each for each in app.env.found_docs if each.startswith("benchmarks/"))
        order = [*dict.fromkeys(named), *(f"/{each}" for each in others)]
        text += "\n```{toctree}\n:hidden:\n\n" + "\n".join(order) + "\n```\n"
    source[0] = text


def _docstring(app: Any, kind: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings mark code as the pages do. A signature that a data class has in place of one is left out."""
    text = "\n".join(lines)
    if kind in ("class", "exception") and text.startswith(f"{name.rpartition('.')[2]}("):
        lines[:] = []
    elif TREE.search(text):
        head, _, tree = text.partition("\n\n")
        tree, _, end = tree.partition("\n\n")
        lines[:] = [head, "", "::", "", *(f"    {line}" for line in tree.splitlines()), "", *end.splitlines()]
    else:
        lines[:] = re.sub(r"(?<!`)`([^`\n]+)`(?!`)", r"``\1``", text).replace("*", r"\*").splitlines()
        lines[:] = [re.sub(r"``[^`]*``", lambda found: found[0].replace(r"\*", "*"), line) for line in lines]


def setup(app: Any) -> None:
    app.connect("source-read", _pages)
    app.connect("autodoc-process-docstring", _docstring)
