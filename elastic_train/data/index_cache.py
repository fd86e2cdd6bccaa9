"""Cache of data indices: small files beside the data."""

from __future__ import annotations

import uuid
from pathlib import Path


def replace_whole(path: Path, text: str) -> None:
    """Write a file that others read and write at the same time: they see all of it or none."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    part.write_text(text)
    part.replace(path)
