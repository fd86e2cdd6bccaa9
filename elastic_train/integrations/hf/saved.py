"""`checkpoint-N`: a run's checkpoint as transformers writes one, from the driver."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from elastic_train.errors import CheckpointDeleted, NoCheckpoint
from elastic_train.integrations.hf.given_model import give_values

log = logging.getLogger(__name__)
STATE = "trainer_state.json"


def save_checkpoint(trainer: Any, checkpoint: str, step: int, *, again: bool) -> None:
    """Weights, configuration, tokenizer, arguments and trainer state; older ones go by save_total_limit.
    What is told `again` was written, by a driver before this one, if it is there."""
    args, state = trainer.args, trainer.state
    directory = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
    if again and (directory / STATE).exists():
        _remember_best(trainer)
        return
    try:
        give_values(trainer.model, checkpoint)
    except (CheckpointDeleted, NoCheckpoint) as error:  # a later one took its place
        log.warning("checkpoint-%d was not written: %s", step, error)
        return
    trainer.save_model(str(directory))
    _remember_best(trainer)
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(callback, ExportableState):
            state.stateful_callbacks[type(callback).__name__] = callback.state()
    state.save_to_json(str(directory / STATE))
    rotate_checkpoints(
        output_dir=args.output_dir,
        save_total_limit=args.save_total_limit,
        best_model_checkpoint=state.best_model_checkpoint,
        use_mtime=True,
    )


def _remember_best(trainer: Any) -> None:
    state = trainer.state
    if state.best_global_step:
        best = Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
        if best.exists():
            state.best_model_checkpoint = str(best)
