"""Lightning's callbacks that have an equivalent here; all others are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_train.config import Checkpoints
from elastic_train.errors import ConfigError
from elastic_train.integrations.lightning.progress import Stopping

HELD = frozenset({"LearningRateMonitor"})
"""What they do is done in any case: rates are in the run's history."""
REFUSED: Mapping[str, str] = {
    "Timer": "Give max_steps or max_epochs.",
    "ModelSummary": "Leave it out.",
    "RichModelSummary": "Leave it out.",
    "TQDMProgressBar": "Leave it out: a run shows itself in the terminal, and fit(page=8420) serves a page.",
    "RichProgressBar": "Leave it out: a run shows itself in the terminal, and fit(page=8420) serves a page.",
    "GradientAccumulationScheduler": "Give accumulate_grad_batches as a number.",
    "StochasticWeightAveraging": "Keep an average in a submodule, and move it in on_train_batch_end.",
    "WeightAveraging": "Keep an average in a submodule, and move it in on_train_batch_end.",
    "EMAWeightAveraging": "Keep an average in a submodule, and move it in on_train_batch_end.",
    "DeviceStatsMonitor": "Ray's dashboard shows what machines do.",
    "BackboneFinetuning": "Set requires_grad of the module's parameters in on_train_epoch_start.",
    "BaseFinetuning": "Set requires_grad of the module's parameters in on_train_epoch_start.",
}
"""By callback, what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Translated:
    """What the callbacks come to. `files` writes `.ckpt` files when the run is over."""

    stopping: tuple[Stopping, ...]
    checkpoints: Checkpoints | None
    files: Any = None


def translated(callbacks: Sequence[Any], *, steps_per_epoch: int, each_epoch: bool) -> Translated:
    """ConfigError names a callback, or an argument of one, that has no equivalent. `each_epoch`: whether each
    epoch ends with the only validation of it."""
    stopping, checkpoints, files = list[Stopping](), None, None
    for callback in callbacks:
        known = [cls.__name__ for cls in type(callback).__mro__ if _is_theirs(cls)]
        own = type(callback).__name__
        if own in HELD and own in known:
            continue
        if own == "EarlyStopping" and own in known:
            stopping.append(_stopping(callback, each_epoch))
        elif own == "ModelCheckpoint" and own in known:
            if checkpoints is not None:
                raise ConfigError(field="callbacks", problem="there are several ModelCheckpoint.")
            checkpoints, files = _checkpoints(callback, steps_per_epoch), callback
        else:
            remedy = next((REFUSED[name] for name in known if name in REFUSED), "")
            raise ConfigError(
                field=f"callbacks: {own}",
                problem="its hooks are not called.",
                remedy=remedy
                or "Do it in hooks of the module, or in a UserCallback of RunConfig, which hears of events.",
            )
    return Translated(stopping=tuple(stopping), checkpoints=checkpoints, files=files)


def _is_theirs(cls: type) -> bool:
    return cls.__module__.split(".")[0] in ("lightning", "pytorch_lightning")


def _stopping(callback: Any, each_epoch: bool) -> Stopping:
    said = callback._check_on_train_epoch_end
    return Stopping(
        monitor=callback.monitor,
        min_delta=abs(callback.min_delta),
        patience=callback.patience,
        mode=callback.mode,
        strict=callback.strict,
        check_finite=callback.check_finite,
        stopping_threshold=callback.stopping_threshold,
        divergence_threshold=callback.divergence_threshold,
        each_epoch=each_epoch if said is None else said,
    )


def _checkpoints(callback: Any, steps_per_epoch: int) -> Checkpoints:
    if callback._train_time_interval is not None:
        raise ConfigError(
            field="ModelCheckpoint(train_time_interval=...)",
            problem="saves are by steps.",
            remedy='Give every_n_train_steps, or checkpoints=Checkpoints(every="auto") of fit.',
        )
    if callback.save_top_k < 0:
        raise ConfigError(
            field="ModelCheckpoint(save_top_k=-1)",
            problem="keeps all.",
            remedy="Say how many are to stay.",
        )
    steps = callback._every_n_train_steps or (callback._every_n_epochs or 1) * steps_per_epoch
    if callback.monitor is None or callback.save_top_k == 0:
        return Checkpoints(every=steps)
    return Checkpoints(
        every=steps, best=callback.monitor, best_order=callback.mode, keep_best=callback.save_top_k
    )
