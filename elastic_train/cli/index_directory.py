"""Where the indexes of other systems' checkpoints are kept, as the environment says."""

from __future__ import annotations

import os
from pathlib import Path

from elastic_train.checkpoint.importers.index_cache import keep_indexes_in


def choose_index_directory() -> None:
    """`ELASTIC_TRAIN_CACHE`, nowhere if that is empty; else in `XDG_CACHE_HOME`; else in ~/.cache."""
    named, base = os.environ.get("ELASTIC_TRAIN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if named is not None:
        keep_indexes_in(Path(named) / "indexes" if named else None)
    elif base:
        keep_indexes_in(Path(base) / "elastic_train" / "indexes")
