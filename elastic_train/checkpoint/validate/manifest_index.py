"""Validate the index of a large manifest: each tensor with its rows, every row in exactly one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.dtypes import element
from elastic_train.checkpoint.validate.manifest_rows import check_shape, malformed
from elastic_train.checkpoint.validate.state import check_count


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorIndex:
    """By key: names, dtypes, shapes, and where the rows of each begin; `firsts` has the end as well."""

    names: tuple[tuple[str, str], ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    firsts: tuple[int, ...]


def read_index(text: str, rows: int, *, url: str) -> TensorIndex:
    """The index of a manifest of so many rows; Malformed unless its entries divide them among them."""
    check_count(text.encode(), url=url)
    try:
        words: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise malformed(url, f"its manifest's index can't be read ({type(error).__name__})") from error
    if not isinstance(words, list):
        raise malformed(url, "its manifest's index is no list")
    names: list[tuple[str, str]] = []
    kinds: list[tuple[str, tuple[int, ...]]] = []
    firsts = [0]
    for word in words:
        match word:
            case [str(tensor), str(state), str(dtype), [*shape], first, count] if (
                all(type(n) is int for n in (*shape, first, count))
                and tensor
                and state
                and first == firsts[-1]
                and 0 < count <= rows - first
            ):
                element(dtype, url=url)
                check_shape((tensor, state), dtype, tuple(shape), url=url)
                names.append((tensor, state))
                kinds.append((dtype, tuple(shape)))
                firsts.append(first + count)
            case _:
                raise malformed(url, f"entry {len(names)} of its manifest's index can't be")
    if firsts[-1] != rows or len(set(names)) != len(names):
        raise malformed(url, "its manifest's index is not of its rows")
    return TensorIndex(
        names=tuple(names),
        dtypes=tuple(dtype for dtype, _ in kinds),
        shapes=tuple(shape for _, shape in kinds),
        firsts=tuple(firsts),
    )
