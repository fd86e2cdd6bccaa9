"""The private parts of Ray Train that we rely on.

Only what runs in the driver may load them: Ray Train brings pandas along, a second for each process.
"""

from __future__ import annotations

from ray.train import DataConfig, RunConfig, ScalingConfig
from ray.train.backend import BackendConfig
from ray.train.v2._internal.execution.context import TrainRunContext


def train_context(run: RunConfig, scaling: ScalingConfig) -> TrainRunContext:
    """What Ray Train's callbacks are given about their run."""
    return TrainRunContext(
        run_config=run,
        train_loop_config=None,
        scaling_config=scaling,  # pyright: ignore[reportArgumentType]
        backend_config=BackendConfig(),
        dataset_config=DataConfig(),
    )
