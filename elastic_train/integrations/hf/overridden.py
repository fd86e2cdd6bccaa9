"""Methods of a trainer or a callback that a script overrides: those that nobody calls are refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import TrainerCallback

from elastic_train.errors import ConfigError

NOT_CALLED = {
    "training_step": "write compute_loss, or a loop (docs/loops.md)",
    "get_train_dataloader": "give a data set and a collator",
    "_get_train_sampler": "order the data set, with train_sampling_strategy='sequential'",
    "get_batch_samples": "give a data set and a collator",
    "_prepare_inputs": "change inputs in the data collator",
    "_prepare_input": "change inputs in the data collator",
    "compute_loss_context_manager": "enter contexts in compute_loss",
    "autocast_smart_context_manager": "use bf16 or fp16",
    "create_accelerator_and_postprocess": "there is no accelerator in a worker",
    "create_optimizer_and_scheduler": "override create_optimizer and create_scheduler",
    "set_initial_training_values": "use max_steps or num_train_epochs",
    "floating_point_ops": "they are not counted",
    "call_model_init": "give the model",
    "train": "call it",
}
IN_A_RUN = ("evaluate", "evaluation_loop", "prediction_step", "get_eval_dataloader", "_get_eval_sampler")
"""Called in the driver after a run, and not while it trains."""
NOT_TOLD = ("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end")
"""Events of a callback within a step, which is over when the driver hears of it."""
TOLD_AFTERWARDS = "on_prediction_step"
CALLED_INSIDE = frozenset({"_save", "_load_best_model", "_move_model_to_device"})


def check_overridden(kind: type, theirs: type, ours: type, *, evaluates: bool) -> None:
    """ConfigError for a method that the script overrides and nothing would call while it trains."""
    found: dict[str, Any] = {}
    for one in kind.__mro__:
        if one is ours:
            break
        found |= {name: one for name, value in vars(one).items() if callable(value) and hasattr(theirs, name)}
    for name in found:
        why = NOT_CALLED.get(name)
        if why is None and name in IN_A_RUN and evaluates:
            why = "use compute_metrics and preprocess_logits_for_metrics, or eval_strategy='no'"
        inner = name.startswith("_") and not name.startswith("__") and name not in (*CALLED_INSIDE, *IN_A_RUN)
        if why is None and inner:
            why = "it belongs to transformers' own loop"
        if why is not None:
            raise ConfigError(
                field=f"Trainer.{name}",
                problem="is overridden, and the run does not call it.",
                remedy=f"{why}.",
            )


def check_callbacks(callbacks: Iterable[TrainerCallback], *, evaluates: bool) -> None:
    """ConfigError for an event that a script's callback waits for and is never told of while it trains."""
    events = (*NOT_TOLD, TOLD_AFTERWARDS) if evaluates else NOT_TOLD
    for callback in callbacks:
        kind = type(callback)
        if kind.__module__.partition(".")[0] == "transformers":  # bars of progress
            continue
        for event in events:
            if getattr(kind, event, None) is not getattr(TrainerCallback, event):
                raise ConfigError(
                    field=f"{kind.__name__}.{event}",
                    problem="callbacks are in the driver, and hear of a step when it is over.",
                    remedy="Use on_evaluate." if event == TOLD_AFTERWARDS else "Use on_step_end.",
                )
