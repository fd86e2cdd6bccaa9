"""What both systems of the switch benchmark are given."""

from __future__ import annotations

from typing import Literal

Way = Literal["growth", "drain"]
WORKERS = 2  # nodes of one worker each at the start; a growth adds one
GLOBAL_BATCH, MICRO_BATCH = 24, 2
CHECKPOINT_EVERY = 10
LABELS = {"tiny": "200k", "small": "6m", "base": "85m"}  # parameters, by size
SETTLED = {"tiny": 15, "small": 10, "base": 6}  # steps of a group before the next change, by size
NOTICE_S = 60.0  # a drain's
GIVE_UP_S = 240.0  # for one change
