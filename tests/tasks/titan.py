"""torchtitan's debug Llama 3, small, and torchtitan's own parts around it in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss, cross_entropy_loss
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel

import elastic_train as et
from elastic_train.data.order import SampleOrder

SEED, STEPS, LENGTH = 3, 6, 16
VOCABULARY = 2048


def config(**parallelism: Any) -> Any:
    """Two layers of the debug model, with groups of parameters and rates that change."""
    made = llama3_debugmodel()
    del made.model_spec.model.layers[2:]
    kinds = [(r"norm", {"lr": 2e-3, "weight_decay": 0.0}), (r".*", {"lr": 1e-3, "weight_decay": 0.1})]
    made.optimizer = OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=settings)
            for pattern, settings in kinds
        ],
        implementation="for-loop",
    )
    made.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.5, decay_type="cosine")
    made.training = TrainingConfig(
        local_batch_size=2, global_batch_size=8, seq_len=LENGTH, steps=STEPS, mixed_precision_param="float32"
    )
    made.parallelism = ParallelismConfig(**parallelism)
    made.loss = CrossEntropyLoss.Config()
    made.validator.enable = made.checkpoint.enable = False
    made.debug.seed = SEED
    return made


def windows(count: int = 20, length: int = LENGTH) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return list(torch.randint(0, VOCABULARY, (count, length + 1), generator=made))


class Titan:
    """What torchtitan's Trainer does on one rank, around its own model, optimizers, rates and loss."""

    def __init__(self, config: Any) -> None:
        self.config = config = copy.deepcopy(config)
        for layer in config.model_spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        config.model_spec.model.update_from_config(config=config)
        torch.manual_seed(config.debug.seed)
        with torch.device("meta"):
            self.model = config.model_spec.model.build()
        self.model.to_empty(device="cpu")
        with torch.no_grad():
            self.model.init_weights()
        self.model.train()
        self.optimizers = config.optimizer.build(model_parts=[self.model])
        self.rates = config.lr_scheduler.build(
            optimizers=self.optimizers, training_steps=config.training.steps
        )
        self.rates_of_steps: list[float] = []
        self._step = 0

    def save(self, root: Path, step: int) -> Path:
        """By torchtitan's own CheckpointManager."""
        self._step = step
        self._manager(root).save(step, last_step=True)
        return root / "checkpoint" / f"step-{step}"

    def load(self, root: Path) -> int:
        """The step of the newest one in a folder."""
        manager = self._manager(root.parent, root.name)
        assert manager.load()
        return self._step

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self._step, dtype=torch.int32), "ntokens_seen": torch.tensor(77)}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        self._step = int(kept["step"])

    def _manager(self, root: Path, folder: str = "checkpoint") -> CheckpointManager:
        manager = CheckpointManager(
            CheckpointManager.Config(enable=True, folder=folder, interval=1, last_save_model_only=False),
            dataloader=None, model_parts=[self.model], optimizers=self.optimizers, lr_schedulers=self.rates,
            states={"train_state": self}, sd_adapter=None, base_folder=str(root),
        )  # fmt: skip
        manager.states.pop("dataloader")
        return manager

    def train(self, dataset: list[Any], batch: et.Batch, first: int, last: int) -> list[float]:
        """The losses of steps `first` to `last`, on the samples that a run has in them."""
        order, losses = SampleOrder(len(dataset), batch), list[float]()
        for step in range(first, last + 1):
            self.optimizers.zero_grad()
            micro_batches = [_pair([dataset[i] for i in m.ids]) for m in order.micro_batches(step)]
            counted, total = sum((labels != -100).sum() for _, labels in micro_batches), 0.0
            for tokens, labels in micro_batches:
                loss = cross_entropy_loss(self.model(tokens), labels) / counted
                loss.backward()
                total += loss.item()
            clip_grad_norm_(
                list(self.model.parameters()), self.config.training.max_norm, foreach=True, ep_enabled=False
            )
            self.rates_of_steps.append(self.rates.schedulers[0].get_last_lr()[0])
            self.optimizers.step()
            self.rates.step()
            losses.append(total)
        return losses


def _pair(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(samples[0], tuple):
        whole = torch.stack([torch.as_tensor(window) for window in samples])
        return whole[:, :-1], whole[:, 1:]
    tokens, labels = zip(*samples, strict=True)
    return torch.stack(tokens), torch.stack(labels)
