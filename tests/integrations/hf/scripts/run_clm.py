"""As transformers' run_clm: arguments of model and data as dataclasses, texts put together and cut into
blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    HfArgumentParser,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from elastic_train.integrations.hf import Trainer
from jobs.hf_trainer import sentences, tokenizer_of


@dataclass
class ModelArguments:
    model_type: str = field(default="gpt2", metadata={"help": "a configuration that transformers knows"})
    attn_implementation: str = "eager"


@dataclass
class DataTrainingArguments:
    block_size: int = 16
    validation_split_percentage: int = 10


def main(argv: list[str] | None = None) -> Trainer:
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses(argv)
    set_seed(training_args.seed)
    texts = sentences(160, seed=2)
    tokenizer = tokenizer_of(texts)
    config = AutoConfig.for_model(
        model_args.model_type,
        vocab_size=len(tokenizer),
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation=model_args.attn_implementation,
    )
    model = AutoModelForCausalLM.from_config(config)

    def tokenize(examples: dict[str, list[str]]) -> Any:
        return tokenizer(examples["text"])

    def group(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        whole = {key: list(chain(*examples[key])) for key in examples}
        size = data_args.block_size
        total = len(whole["input_ids"]) // size * size
        blocks = {key: [values[i : i + size] for i in range(0, total, size)] for key, values in whole.items()}
        blocks["labels"] = [list(block) for block in blocks["input_ids"]]
        return blocks

    raw = Dataset.from_dict({"text": texts}).map(tokenize, batched=True, remove_columns=["text"])
    blocks = raw.map(group, batched=True)
    held_out = len(blocks) * data_args.validation_split_percentage // 100
    train_dataset, eval_dataset = blocks.select(range(held_out, len(blocks))), blocks.select(range(held_out))

    def preprocess_logits_for_metrics(logits: Any, labels: Any) -> Any:
        logits = logits[0] if isinstance(logits, tuple) else logits
        return logits.argmax(dim=-1)

    def compute_metrics(predicted: Any) -> dict[str, float]:
        predictions, labels = predicted
        return {"accuracy": float((predictions[:, :-1] == labels[:, 1:]).mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    metrics = train_result.metrics
    metrics["train_samples"] = len(train_dataset)
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()

    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    return trainer


if __name__ == "__main__":
    main()
