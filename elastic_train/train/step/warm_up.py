"""Warm a newcomer up: a micro-batch goes through a model that is thrown away, before anybody waits for it.

What torch compiles, and what libraries make at first use, is kept by the process and not by the model.
Nothing is judged here: the model has no values, and nobody answers in its group.
"""

from __future__ import annotations

import torch

from elastic_train.train.state.shards import Shards
from elastic_train.train.step.micro_batch_work import Work
from elastic_train.train.step.stepper import Stepper
from elastic_train.train.step.workload import GroupContext, Workload


def warm_up(workload: Workload, context: GroupContext, shards: Shards, step: int) -> None:
    """Run the first micro-batch of a step, forward and backward, on shards that nobody needs.

    Raises whatever the job's code says of a model of zeros.
    """
    with torch.no_grad():
        for tensor in (*shards.parameters.values(), *shards.buffers.values()):
            tensor.zero_()
    stepper = Stepper(workload, context, shards)
    micro_batch = workload.order.micro_batches(step)[0]
    for _ in stepper.passes(step, [Work(micro_batch=micro_batch, filler=True)], rehearsed=True):
        pass
