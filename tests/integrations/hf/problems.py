"""Small models and data of transformers' kinds, and a trainer of theirs beside one of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from ray.train import UserCallback
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    TrainingArguments,
)
from transformers import Trainer as Theirs

from elastic_train.integrations.hf import Trainer
from elastic_train.integrations.hf.described import described
from elastic_train.testing.single_process_run import train_alone
from elastic_train.train.step.training_loop import StepReport

Row = dict[str, Any]


def causal(seed: int = 3, **changes: Any) -> Any:
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        **changes,
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings))


def classifier(seed: int = 3, **changes: Any) -> Any:
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "num_labels": 3,
        **changes,
    }
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", **settings))


def texts(count: int = 23, length: int = 12) -> list[Row]:
    """Token ids, of which some at the beginning are no targets."""
    draw = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(count):
        ids = torch.randint(0, 64, (length,), generator=draw)
        labels = ids.clone()
        labels[: int(torch.randint(0, 9, (), generator=draw))] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def labelled(count: int = 23, length: int = 12) -> list[Row]:
    draw = torch.Generator().manual_seed(2)
    return [
        {"input_ids": torch.randint(0, 64, (length,), generator=draw), "label": int(n % 3)}
        for n in range(count)
    ]


def arguments(directory: Path, **changes: Any) -> TrainingArguments:
    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **changes,
    }
    return TrainingArguments(output_dir=str(directory), **settings)


def described_steps(trainer: Trainer) -> list[StepReport]:
    """What a run of it does in one process, without a cluster."""
    trainer._prepare_model()
    plan = described(trainer)
    return train_alone(plan.task, plan.trainer(UserCallback(), None).spec)


def check_equal(
    directory: Path,
    make: Callable[[], Mapping[str, Any]],
    *,
    kinds: Callable[[type], type] = lambda kind: kind,
    tolerance: float = 1e-6,
    **changes: Any,
) -> list[StepReport]:
    """Losses, norms and rates of both from the same start. `kinds` makes the script's own class of each."""
    theirs = kinds(Theirs)(args=arguments(directory / "theirs", **changes), **make())
    theirs.train()
    expected = [entry for entry in theirs.state.log_history if "loss" in entry]
    ours = kinds(Trainer)(args=arguments(directory / "ours", **changes), **make())
    reports = described_steps(ours)
    steps = [one for n, one in enumerate(reports) if n == 0 or one.step != reports[n - 1].step]
    assert len(steps) == len(expected)
    for step, entry in zip(steps, expected, strict=True):
        assert abs(step.loss - entry["loss"]) <= tolerance * max(1.0, abs(entry["loss"])), (step.step, entry)
        assert abs(step.grad_norm - entry["grad_norm"]) <= 10 * tolerance * max(1.0, entry["grad_norm"]), (
            step.step
        )
        assert abs(step.rates[0] - entry["learning_rate"]) <= 1e-9, step.step
    return reports
