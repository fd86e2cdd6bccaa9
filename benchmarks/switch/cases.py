"""What both systems of the switch benchmark are given."""

from __future__ import annotations

from typing import Literal

Way = Literal["growth", "drain"]
WORKERS = 2  # nodes of one worker each at the start; a growth adds one
GLOBAL_BATCH, MICRO_BATCH = 24, 2
CHECKPOINT_EVERY = 10
SETTLED = 15  # steps of a group before the next change
NOTICE_S = 60.0  # a drain's
GIVE_UP_S = 240.0  # for one change
