"""As transformers' run_glue: pairs of sentences to classify, padded by batch, with metrics of all
predictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    TrainingArguments,
    set_seed,
)

from elastic_train.integrations.hf import Trainer
from jobs.hf_trainer import sentences, tokenizer_of


@dataclass
class DataTrainingArguments:
    max_seq_length: int = 48
    max_predict_samples: int = 12


def main(argv: list[str] | None = None) -> Trainer:
    parser = HfArgumentParser((DataTrainingArguments, TrainingArguments))
    data_args, training_args = parser.parse_args_into_dataclasses(argv)
    set_seed(training_args.seed)
    firsts, seconds = sentences(120, seed=3), sentences(120, seed=4)
    tokenizer = tokenizer_of(firsts + seconds)
    config = AutoConfig.for_model(
        "bert",
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    model = AutoModelForSequenceClassification.from_config(config)

    def preprocess(examples: dict[str, list[str]]) -> Any:
        result = tokenizer(
            examples["sentence1"],
            examples["sentence2"],
            max_length=data_args.max_seq_length,
            truncation=True,
        )
        result["label"] = [
            int(len(a) > len(b)) for a, b in zip(examples["sentence1"], examples["sentence2"], strict=True)
        ]
        return result

    raw = Dataset.from_dict({"sentence1": firsts, "sentence2": seconds, "idx": list(range(120))})
    raw = raw.map(preprocess, batched=True)
    train_dataset, eval_dataset = raw.select(range(90)), raw.select(range(90, 120))
    predict_dataset = eval_dataset.select(range(data_args.max_predict_samples))

    def compute_metrics(p: EvalPrediction) -> dict[str, float]:
        preds = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
        preds = np.argmax(preds, axis=1)
        return {"accuracy": float((preds == p.label_ids).mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8),
    )
    train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", train_result.metrics)
    trainer.save_metrics("train", train_result.metrics)
    trainer.save_state()

    metrics = trainer.evaluate(eval_dataset=eval_dataset)
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)

    predictions = trainer.predict(
        predict_dataset.remove_columns("label"), metric_key_prefix="predict"
    ).predictions
    np.save(f"{training_args.output_dir}/predictions.npy", predictions)
    return trainer


if __name__ == "__main__":
    main()
