"""What training on CPUs is held to, on the rehearsal device: plans, moves, recovery, replay, loops."""

from __future__ import annotations

import pytest

from tests.train.test_axes import *  # noqa: F403
from tests.train.test_background_saver import *  # noqa: F403
from tests.train.test_broken_step import *  # noqa: F403
from tests.train.test_compare_replicas import *  # noqa: F403
from tests.train.test_context import *  # noqa: F403
from tests.train.test_evaluate import *  # noqa: F403
from tests.train.test_in_backward import *  # noqa: F403
from tests.train.test_loops import *  # noqa: F403
from tests.train.test_moves import *  # noqa: F403
from tests.train.test_plans import *  # noqa: F403
from tests.train.test_replay import *  # noqa: F403
from tests.train.test_saving import *  # noqa: F403

pytestmark = [
    pytest.mark.ring2,
    pytest.mark.matrix,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("late_queues"),
]
