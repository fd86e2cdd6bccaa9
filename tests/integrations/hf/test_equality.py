"""The losses of transformers' Trainer in one process, step by step, from the same start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("transformers", reason="what is compared with")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
from tests.integrations.hf.problems import arguments, causal, check_equal, classifier, labelled, texts

pytestmark = pytest.mark.ring2


def language() -> dict[str, Any]:
    return {"model": causal(), "train_dataset": texts()}


def classes() -> dict[str, Any]:
    return {"model": classifier(), "train_dataset": labelled()}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"warmup_steps": 0.4, "weight_decay": 0.1, "max_grad_norm": 0.5},
        {"lr_scheduler_type": "cosine", "warmup_steps": 2, "gradient_accumulation_steps": 1},
        {"max_grad_norm": 0.0, "max_steps": 5},
        {"label_smoothing_factor": 0.1},
        {"train_sampling_strategy": "sequential", "dataloader_drop_last": True},
        {"data_seed": 7, "seed": 5},
        {"activation_checkpointing": True},
        {"optim": "adafactor"},
        {"optim": "sgd", "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3},
    ],
    ids=str,
)
def test_a_causal_language_model(tmp_path: Path, changes: dict[str, Any]) -> None:
    check_equal(tmp_path, language, **changes)


@pytest.mark.parametrize(
    "changes", [{}, {"gradient_accumulation_steps": 1}, {"label_smoothing_factor": 0.1}], ids=str
)
def test_a_classifier_whose_mean_is_added_up_over_accumulated_batches(tmp_path: Path, changes: Any) -> None:
    check_equal(tmp_path, classes, **changes)


def test_rows_of_unlike_lengths_grouped_and_padded(tmp_path: Path) -> None:
    from transformers import DataCollatorForSeq2Seq

    from jobs.hf_trainer import tokenizer_of

    rows = [{name: row[name][: 4 + n % 7].tolist() for name in row} for n, row in enumerate(texts(40))]
    collator = DataCollatorForSeq2Seq(tokenizer_of(["a b c"]))
    check_equal(
        tmp_path,
        lambda: {"model": causal(), "train_dataset": rows, "data_collator": collator},
        train_sampling_strategy="group_by_length",
    )


def test_an_overridden_loss_of_the_whole_accumulated_batch(tmp_path: Path) -> None:
    def kinds(base: type) -> type:
        class Weighted(base):
            def compute_loss(
                self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
            ):
                labels = inputs.pop("labels")
                outputs = model(**inputs)
                logits, targets = outputs.logits[:, :-1], labels[:, 1:]
                losses = F.cross_entropy(
                    logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100
                )
                loss = losses / num_items_in_batch
                return (loss, outputs) if return_outputs else loss

        return Weighted

    check_equal(tmp_path, language, kinds=kinds)


@pytest.mark.parametrize("scaled", [None, False])
def test_an_overridden_loss_that_is_a_mean(tmp_path: Path, scaled: bool | None) -> None:
    def kinds(base: type) -> type:
        class Mean(base):
            loss_is_scaled_for_ga = scaled

            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any):
                labels = inputs.pop("labels")
                outputs = model(**inputs)
                weight = torch.tensor([1.0, 2.0, 0.5])
                loss = F.cross_entropy(outputs.logits, labels, weight=weight)
                return (loss, outputs) if return_outputs else loss

        return Mean

    check_equal(tmp_path, classes, kinds=kinds)


def test_a_loss_function_of_outputs_and_labels(tmp_path: Path) -> None:
    def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        losses = F.cross_entropy(
            outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100
        )
        return losses / num_items_in_batch

    check_equal(tmp_path, lambda: {**language(), "compute_loss_func": summed})


def test_an_optimizer_and_a_schedule_that_are_given(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        model = causal()
        biased = [p for n, p in model.named_parameters() if "norm" in n]
        rest = [p for n, p in model.named_parameters() if "norm" not in n]
        optimizer = torch.optim.AdamW([{"params": rest, "weight_decay": 0.2}, {"params": biased}], lr=3e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"model": model, "train_dataset": texts(), "optimizers": (optimizer, schedule)}

    check_equal(tmp_path, make)


def test_an_optimizer_by_its_class(tmp_path: Path) -> None:
    check_equal(
        tmp_path,
        lambda: {
            **language(),
            "optimizer_cls_and_kwargs": (torch.optim.NAdam, {"lr": 2e-3, "betas": (0.8, 0.9)}),
        },
    )


def test_a_model_that_a_function_makes(tmp_path: Path) -> None:
    check_equal(tmp_path, lambda: {"model_init": lambda: causal(), "train_dataset": texts()})


def test_tied_weights_and_frozen_ones(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        model = causal(tie_word_embeddings=True)
        model.model.layers[0].requires_grad_(False)
        return {"model": model, "train_dataset": texts()}

    check_equal(tmp_path, make)


@pytest.mark.filterwarnings("default")  # peft reads what transformers is about to rename
def test_adapters_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the adapters are its")

    def make() -> dict[str, Any]:
        model = causal()
        torch.manual_seed(4)
        settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        return {"model": peft.get_peft_model(model, settings), "train_dataset": texts()}

    check_equal(tmp_path, make)


def test_evaluations_have_the_metrics_of_all_predictions(tmp_path: Path) -> None:
    from transformers import Trainer as Theirs

    from elastic_train.integrations.hf import Trainer
    from tests.integrations.hf.problems import described_steps

    def metrics(predicted: Any) -> dict[str, float]:
        right = predicted.predictions.argmax(-1) == predicted.label_ids
        return {"accuracy": float(right.mean()), "spread": float(predicted.predictions.std())}

    given = {"train_dataset": labelled(), "compute_metrics": metrics}
    given["eval_dataset"] = {"near": labelled(13), "far": labelled(9)}
    changes = {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 1.9,
    }
    theirs = Theirs(model=classifier(), args=arguments(tmp_path / "theirs", **changes), **given)
    theirs.train()
    expected: dict[int, dict[str, float]] = {}
    for entry in theirs.state.log_history:
        found = {
            k: v
            for k, v in entry.items()
            if k.startswith("eval_") and not k.endswith(("runtime", "second", "time"))
        }
        expected.setdefault(entry["step"], {}).update(found)
    ours = Trainer(model=classifier(), args=arguments(tmp_path / "ours", **changes), **given)
    reports = {r.step: dict(r.metrics) for r in described_steps(ours) if r.metrics}
    assert reports.keys() == {step for step, found in expected.items() if found}
    for step, found in reports.items():
        assert found == pytest.approx(expected[step], rel=1e-5), step
