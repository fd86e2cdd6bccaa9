"""Every argument of transformers' Trainer has its effect, has none for a reason that is told, or is
refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="whose arguments these are")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from elastic_train.errors import ConfigError
from elastic_train.integrations.hf import Trainer
from elastic_train.integrations.hf.arguments import FIELDS, check_arguments
from elastic_train.integrations.hf.described import described
from tests.integrations.hf.problems import arguments, causal, texts

pytestmark = pytest.mark.ring2
PAGE = Path(__file__).parents[3] / "docs" / "hf.md"


def test_each_field_of_training_arguments_is_in_the_table_and_no_other() -> None:
    assert FIELDS.keys() == {field.name for field in dataclasses.fields(TrainingArguments)}


def test_the_page_has_the_table() -> None:
    rows = [f"| `{name}` | {treatment} | {why} |" for name, (treatment, why) in FIELDS.items()]
    assert "\n".join(rows) in PAGE.read_text()


REFUSED = {
    "neftune_noise_alpha": 5.0,
    "auto_find_batch_size": True,
    "eval_delay": 3,
    "include_num_input_tokens_seen": "all",
    "average_tokens_across_devices": False,
    "ignore_data_skip": True,
    "accelerator_config": {"split_batches": True},
    "train_sampling_strategy": "batch_rebalance",
    "optim": "adamw_8bit",
    "push_to_hub": True,
    "dataloader_in_order": False,
    "use_liger_kernel": True,
    "enable_jit_checkpoint": True,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    object.__setattr__(args, name, REFUSED[name])
    with pytest.raises(ConfigError, match=f"TrainingArguments.{name}"):
        Trainer(model=causal(), args=args, train_dataset=texts())


def test_an_argument_of_a_newer_version_is_refused_where_it_is_set(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Newer(TrainingArguments):
        sparkle: float = 0.0

    check_arguments(Newer(output_dir=str(tmp_path), use_cpu=True))
    with pytest.raises(ConfigError, match=r"TrainingArguments\.sparkle: 0\.5 is not supported"):
        check_arguments(Newer(output_dir=str(tmp_path), use_cpu=True, sparkle=0.5))


def test_a_method_that_nothing_calls_is_refused_by_its_name(tmp_path: Path) -> None:
    class Steps(Trainer):
        def training_step(self, *given: Any, **named: Any) -> Any:
            return super().training_step(*given, **named)

    class Evaluates(Trainer):
        def evaluate(self, *given: Any, **named: Any) -> Any:
            return super().evaluate(*given, **named)

    given = {"model": causal(), "train_dataset": texts(), "eval_dataset": texts(3)}
    with pytest.raises(ConfigError, match=r"Trainer\.training_step"):
        Steps(args=arguments(tmp_path), **given)
    Evaluates(args=arguments(tmp_path), **given)
    with pytest.raises(ConfigError, match=r"Trainer\.evaluate"):
        Evaluates(args=arguments(tmp_path, eval_strategy="steps", eval_steps=2), **given)


@pytest.mark.parametrize(
    "event", ["on_pre_optimizer_step", "on_optimizer_step", "on_substep_end", "on_prediction_step"]
)
def test_an_event_that_no_callback_is_told_of_is_refused_by_its_name(event: str, tmp_path: Path) -> None:
    waits = type("Waits", (TrainerCallback,), {event: lambda *_, **__: None})
    given = {"model": causal(), "train_dataset": texts(), "eval_dataset": texts(3)}
    evaluating = arguments(tmp_path, eval_strategy="steps", eval_steps=2)
    with pytest.raises(ConfigError, match=rf"Waits\.{event}"):
        Trainer(args=evaluating, callbacks=[waits], **given)
    trainer = Trainer(args=evaluating, **given)
    trainer.add_callback(waits)
    with pytest.raises(ConfigError, match=rf"Waits\.{event}"):
        trainer.train()
    if event == "on_prediction_step":  # told of in the driver's own evaluate
        Trainer(args=arguments(tmp_path), callbacks=[waits], **given)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"tokenizer": None}, r"Trainer\(tokenizer=...\)"),
        ({"max_steps": 3}, r"Trainer\(max_steps=...\): follows from TrainingArguments"),
        ({"devices": 0}, r"Trainer\(devices=...\)"),
    ],
    ids=str,
)
def test_an_option_that_nobody_knows_is_refused(tmp_path: Path, named: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Trainer(model=causal(), args=arguments(tmp_path), train_dataset=texts(), **named)


def refused(trainer: Trainer, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        described(trainer)


def test_a_loss_that_is_no_mean_is_refused(tmp_path: Path) -> None:
    class Affine(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ):
            return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch) + 1.0

    class Twice(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ):
            return model(**inputs).loss + model(**inputs).loss

    given = {"args": arguments(tmp_path), "train_dataset": texts()}
    refused(Affine(model=causal(), **given), "neither divided by that number nor independent")
    refused(Twice(model=causal(), **given), "calls the model 2 times")


def test_a_threshold_of_early_stopping_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=2, metric_for_best_model="loss")
    trainer = Trainer(
        model=causal(),
        args=args,
        train_dataset=texts(),
        eval_dataset=texts(3),
        callbacks=[EarlyStoppingCallback(2, 0.1)],
    )
    refused(trainer, "early_stopping_threshold")
