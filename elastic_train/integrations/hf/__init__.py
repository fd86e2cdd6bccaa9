"""Hugging Face: `Trainer` takes the place of `transformers.Trainer` in a script that changes its import.

How it is made. A trainer is described, not run: `Trainer.train` turns what it was given into a `Task` and
calls `ElasticTrainer.fit`. There is no second engine.

- *Who computes.* The class is a subclass of transformers' own, so that default collators, label smoothing,
  optimizer groups, schedules, logs, `evaluate`, `predict`, `save_model` and the attributes that scripts read
  are transformers' code. What its training loop did is the engine's. An overridden method that the loop would
  have called and the engine doesn't is refused by name.
- *The loss.* The engine calls the model, and `compute_loss` is asked twice around that: with a stand-in that
  catches what it calls the model with, and with one that returns what the model gave. A loss that is divided
  by `num_items_in_batch` is asked for with 1, which makes it a sum; its count is that of the micro-batch's
  labels. Sums over sums of counts are then what transformers computes over a whole accumulated batch. Other
  losses are means, and each micro-batch counts once, as there. Which of these a loss is, the first batch
  tells, here and before anything starts; what is neither is refused.
- *The batch* is `per_device_train_batch_size * gradient_accumulation_steps * devices`. `devices` is a number
  of the script, part of the training problem, and never that of the workers.
- *The order of samples* is a function of seed and epoch that gives what transformers' samplers give in one
  process; the data set of the task is the script's in that order, and the engine doesn't shuffle.
- *Initial values.* A script hands over a model that is there already. Its structure is pickled without its
  parameters, and these are written once, to the run's storage; a worker reads those of one module after the
  other. The driver's own model waits for the end, or for a checkpoint, and is given the values then.
- *Evaluation* in a run takes the batches of transformers: one sample of the engine's is one of them.
- *Callbacks, logs and `checkpoint-N`* are the driver's: it hears each step, evaluation and checkpoint, and
  calls transformers' own callback handler, in the order of its loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_train.lazy_names import lazily

if TYPE_CHECKING:
    from elastic_train.integrations.hf.trainer import Trainer

__all__ = ["Trainer"]

__getattr__, __dir__ = lazily(__name__, {"Trainer": "trainer"})
