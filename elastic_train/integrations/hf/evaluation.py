"""What an evaluation in a run measures: transformers' losses, and `compute_metrics` of all predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import EvalPrediction
from transformers.trainer_pt_utils import EvalLoopContainer, find_batch_size, nested_detach
from transformers.trainer_utils import denumpify_detensorize

PAD = -100
"""What rows of unlike lengths are filled up with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Of each data set by name, "" for the only one."""

    names: Sequence[str]
    metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None
    preprocess: Callable[[Any, Any], Any] | None
    include: Sequence[str]
    concatenates: bool

    @property
    def keeps(self) -> bool:
        """Whether there are metrics of all predictions."""
        return self.metrics is not None

    def losses(self, mean: torch.Tensor, batch: Mapping[str, Any], name: str) -> dict[str, tuple[Any, Any]]:
        """The mean loss of a batch, as often as it has samples; nothing of the other data sets."""
        size = find_batch_size(batch) or 1
        return {
            f"{_prefix(each)}_loss": (float(mean) * size, size) if each == name else (0.0, 0)
            for each in self.names
        }

    def kept(
        self, trainer: Any, output: Any, batch: Mapping[str, Any], name: str, mean: torch.Tensor
    ) -> dict[str, Any]:
        """What `compute_metrics` is given of a batch."""
        labels = tuple(batch[label] for label in trainer.label_names if batch.get(label) is not None)
        labels = labels if len(labels) == len(trainer.label_names) else ()
        settings = getattr(trainer.model, "config", None)
        left_out = [*(getattr(settings, "keys_to_ignore_at_inference", None) or []), "loss"]
        if isinstance(output, Mapping):
            logits = tuple(value for key, value in output.items() if key not in left_out)
        else:
            logits = output[1:]
        logits, labels = _alone(nested_detach(logits)), _alone(nested_detach(labels))
        if self.preprocess is not None:
            logits = self.preprocess(logits, labels)
        main = getattr(trainer.model, "main_input_name", "input_ids")
        return {
            "name": name,
            "logits": logits,
            "labels": labels,
            "inputs": batch[main] if "inputs" in self.include else None,
            "losses": mean.repeat(find_batch_size(batch) or 1) if "loss" in self.include else None,
        }

    def summary(self, kept: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The metrics of every data set, of all that was kept of it."""
        assert self.metrics is not None
        found: dict[str, float] = {}
        for name in self.names:
            own = [one for one in kept if one["name"] == name]
            columns = {key: self._together([one[key] for one in own]) for key in ("logits", "labels")}
            if columns["logits"] is None or columns["labels"] is None:
                continue
            beside = {key: self._together([one[key] for one in own]) for key in ("inputs", "losses")}
            said = self.metrics(
                EvalPrediction(predictions=columns["logits"], label_ids=columns["labels"], **beside)
            )
            prefix = _prefix(name)
            numbers: Any = denumpify_detensorize(dict(said))
            for key, value in numbers.items():
                found[key if key.startswith(f"{prefix}_") else f"{prefix}_{key}"] = value
        return found

    def _together(self, parts: Sequence[Any]) -> Any:
        container = EvalLoopContainer(self.concatenates, padding_index=PAD)
        for part in parts:
            if part is not None and not (isinstance(part, tuple) and not part):
                container.add(part)
        return container.get_arrays()


def _prefix(name: str) -> str:
    return f"eval_{name}" if name else "eval"


def _alone(values: Any) -> Any:
    return values[0] if isinstance(values, tuple) and len(values) == 1 else values
