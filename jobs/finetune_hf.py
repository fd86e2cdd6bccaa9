"""Train a Hugging Face causal language model, from a local directory, on text. Needs transformers.

python jobs/finetune_hf.py --config my_model --data text.txt

Safetensors in the directory are where training starts from, its tokenizer reads the text; without them the
weights are new and the text is bytes. `elastic-train ckpt export RUN --to hf OUT` writes the result. With
`--lora-rank 8` only adapters are trained, and checkpoints after the first refer to the frozen weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ray.train import RunConfig, ScalingConfig
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import elastic_train as et
from elastic_train.data.numbered import NumberedSamples
from elastic_train.data.stdlib import StandardLibrary
from elastic_train.data.text import TextFiles
from elastic_train.data.tokenizer import PAD
from elastic_train.models.hf_tokens import Tokens
from elastic_train.models.hugging_face import files_of, load_base, rules_of
from elastic_train.models.lora import adapt, adapted_rules
from elastic_train.models.loss import next_token_loss

# A model for trying the job out; it reads bytes.
TINY = """{"model_type": "llama", "vocab_size": 259, "hidden_size": 32, "intermediate_size": 64,
"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}"""


@dataclass(frozen=True, kw_only=True)
class Finetune(et.Task):
    """Next-token prediction with any causal model that transformers builds from a configuration."""

    config: str  # JSON
    tokenizer: str  # a directory that has one; none: the data is read as bytes
    data: str
    seq_len: int
    lr: float
    lora_rank: int
    lora_targets: str  # last names of linear modules
    base: str  # a directory with the weights that adapters are trained beside

    def model(self) -> nn.Module:
        settings = json.loads(self.config) | {"use_cache": False, "attn_implementation": "eager"}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
        rank = self.lora_rank
        if rank:
            adapt(model, self.lora_targets.split(","), rank=rank, alpha=2 * rank)
        if self.base:
            load_base(
                model, self.base, tied=("lm_head.weight",) if settings.get("tie_word_embeddings") else ()
            )
        return model

    def parallelize(self) -> et.Rules:
        with torch.device("meta"):
            model = self.model()
        return adapted_rules(model, rules_of(model))

    def optimizer(self, named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named_params], lr=self.lr, weight_decay=0.01)

    def dataset(self) -> NumberedSamples | Tokens:
        if self.tokenizer:
            return Tokens(self.tokenizer, self.data, seq_len=self.seq_len)
        return TextFiles(self.data or StandardLibrary(), seq_len=self.seq_len)

    def loss(self, output: Any, micro_batch: Tensor) -> tuple[Tensor, Tensor]:
        return next_token_loss(output.logits, micro_batch, ignore_index=-1 if self.tokenizer else PAD)


def trainer(
    *,
    config: str = "",  # a directory
    data: str = "",
    seq_len: int = 64,
    global_size: int = 12,
    micro_size: int = 2,
    max_steps: int = 100,
    lr: float = 1e-3,
    lora_rank: int = 0,
    lora_targets: str = "q_proj,v_proj",
    workers: str = "1:3",
    storage: str = "./runs",
    name: str = "finetune_hf",
) -> et.ElasticTrainer:
    """Train a Hugging Face causal language model on text."""
    least, _, most = workers.partition(":")
    source, given = Path(config), bool(config)
    text = (source / "config.json").read_text() if given else TINY
    weights = config if given and files_of(config) else ""
    return et.ElasticTrainer(
        Finetune(
            config=text,
            tokenizer=config if given and (source / "tokenizer.json").is_file() else "",
            **{"data": data, "seq_len": seq_len, "lr": lr},
            **{"lora_rank": lora_rank, "lora_targets": lora_targets, "base": weights if lora_rank else ""},
        ),
        batch=et.Batch(global_size=global_size, micro_size=micro_size),
        max_steps=max_steps,
        clip_norm=1.0,
        scaling_config=ScalingConfig(num_workers=(int(least), int(most or least))),
        run_config=RunConfig(name=name, storage_path=storage),
        resume_from=None if lora_rank else weights or None,
    )


if __name__ == "__main__":
    et.main(trainer)
