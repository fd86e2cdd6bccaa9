"""What the command line prints. Names come from files that anybody may have written: what a terminal would
act on is shown as an escape.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from typing import Any

from elastic_train.observe.text_columns import plain


def say(text: object = "", *, error: bool = False) -> None:
    """Print lines of text at once; other control characters in them are escaped."""
    lines = str(text).split("\n")
    print("\n".join(map(plain, lines)), file=sys.stderr if error else sys.stdout, flush=True)


def say_line(text: object) -> None:
    """Print one line, whatever is in the names in it."""
    say(plain(str(text)))


def say_json(value: Any) -> None:
    """Print a value as JSON, which knows no NaN: None stands for a number that isn't finite."""
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value))
    say(text)


def tell_waits() -> None:
    """Say on stderr for what storage is waited, once it takes more than a moment."""
    waits = logging.getLogger("elastic_train.storage.retry")
    waits.setLevel(logging.INFO)
    waits.propagate = False
    waits.addHandler(_ToPeople())


class _ToPeople(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage(), error=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
