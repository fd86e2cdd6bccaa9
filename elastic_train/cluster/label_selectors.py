"""Label selectors in Ray's words: which nodes a run may use.

`value`, `!value`, `in(a, b)` and `!in(a, b)`; a node without the label has no value, and so is "not in" any.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from elastic_train.errors import ConfigError

SELECTOR = re.compile(
    r"(?P<no>!?)(?:in\((?P<many>[^()]*)\)|(?P<one>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|))"
)


def parsed(key: str, selector: object) -> tuple[bool, frozenset[str]]:
    """Whether the label has to have one of these values, or none of them."""
    match = SELECTOR.fullmatch(selector.strip()) if isinstance(selector, str) else None
    if match is None:
        raise ConfigError(
            field=f"scaling_config.label_selector[{key!r}]",
            problem=f"{selector!r} is no label selector.",
            remedy="Use 'value', '!value', 'in(a, b)' or '!in(a, b)'.",
        )
    many = match["many"]
    values = [match["one"]] if many is None else many.split(",")
    return not match["no"], frozenset(value.strip() for value in values)


def selected(labels: Mapping[str, str], selectors: Iterable[tuple[str, str]]) -> bool:
    """Whether a node with these labels is meant."""
    return all(
        (labels.get(key) in values) is wanted
        for key, (wanted, values) in ((key, parsed(key, value)) for key, value in selectors)
    )
