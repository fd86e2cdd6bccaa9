"""Train a causal language model with Hugging Face's Trainer. Needs transformers and accelerate.

python jobs/hf_trainer.py --output_dir out --max_steps 200 --per_device_train_batch_size 4 \\
    --gradient_accumulation_steps 4 --eval_strategy steps --eval_steps 50

A script as it is written for `transformers.Trainer`: the import of Trainer is all that is ours. Its model is
small and new, its text made up, so that nothing has to be downloaded.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    TrainingArguments,
    set_seed,
)

from elastic_train.integrations.hf import Trainer

SUBJECTS = ["the node", "a worker", "the driver", "one rank", "the group"]
VERBS = ["keeps", "sends", "loses", "reads", "counts"]
OBJECTS = ["its shard", "the batch", "a gradient", "every step", "the epoch"]


def sentences(count: int, seed: int) -> list[str]:
    """Made-up text."""
    draw = random.Random(seed)
    return [
        " and ".join(
            f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {draw.choice(OBJECTS)}"
            for _ in range(draw.randint(1, 4))
        )
        for _ in range(count)
    ]


def tokenizer_of(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Words as tokens."""
    words = sorted({word for text in texts for word in text.split()})
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<unk>", "<eos>", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )


def main(argv: Sequence[str] | None = None) -> Trainer:
    """Train, evaluate and save."""
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(argv)  # type: ignore[arg-type]
    set_seed(args.seed)
    texts = sentences(240, seed=1)
    tokenizer = tokenizer_of(texts)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = AutoModelForCausalLM.from_config(config)
    rows = [{"input_ids": tokenizer(text + " <eos>")["input_ids"]} for text in texts]

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows[:200],
        eval_dataset=rows[200:],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()

    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    return trainer


if __name__ == "__main__":
    main()
