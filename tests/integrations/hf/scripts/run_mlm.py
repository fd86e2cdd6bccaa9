"""As transformers' run_mlm, line by line: tokens are masked once, where the data is prepared."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    DataCollatorForTokenClassification,
    HfArgumentParser,
    TrainingArguments,
    set_seed,
)

from elastic_train.integrations.hf import Trainer
from jobs.hf_trainer import sentences, tokenizer_of


@dataclass
class DataTrainingArguments:
    mlm_probability: float = 0.3
    max_seq_length: int = 32


def main(argv: list[str] | None = None) -> Trainer:
    parser = HfArgumentParser((DataTrainingArguments, TrainingArguments))
    data_args, training_args = parser.parse_args_into_dataclasses(argv)
    set_seed(training_args.seed)
    texts = sentences(120, seed=5)
    tokenizer = tokenizer_of(texts)
    config = AutoConfig.for_model(
        "roberta",
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
    )
    model = AutoModelForMaskedLM.from_config(config)
    draw = random.Random(training_args.seed)

    def tokenize(examples: dict[str, list[str]]) -> Any:
        result = tokenizer(examples["text"], truncation=True, max_length=data_args.max_seq_length)
        chosen = [[draw.random() < data_args.mlm_probability for _ in ids] for ids in result["input_ids"]]
        rows = list(zip(result["input_ids"], chosen, strict=True))
        result["labels"] = [[i if c else -100 for i, c in zip(ids, own, strict=True)] for ids, own in rows]
        result["input_ids"] = [[1 if c else i for i, c in zip(ids, own, strict=True)] for ids, own in rows]
        return result

    data = Dataset.from_dict({"text": texts}).map(tokenize, batched=True, remove_columns=["text"])
    train_dataset, eval_dataset = data.select(range(100)), data.select(range(100, 120))

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer),
    )
    train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", train_result.metrics)
    trainer.save_metrics("train", train_result.metrics)
    trainer.save_state()

    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    return trainer


if __name__ == "__main__":
    main()
