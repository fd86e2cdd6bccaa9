"""Train a Hugging Face causal language model, from a local directory, on text. Needs transformers.

python jobs/finetune_hf.py --config my_model --data text.txt

Safetensors in the directory are where training starts from, its tokenizer reads the text; without them the
weights are new and the text is bytes. `elastic-train ckpt export RUN --to hf OUT` writes the result.
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import elastic_train as et
from elastic_train.data.numbered import Numbered
from elastic_train.data.stdlib import StandardLibrary
from elastic_train.data.text import TextFiles
from elastic_train.data.tokenizer import PAD
from elastic_train.models.hugging_face import rules_of
from elastic_train.models.loss import next_token_loss

# A model for trying the job out; it reads bytes.
TINY = """{"model_type": "llama", "vocab_size": 259, "hidden_size": 32, "intermediate_size": 64,
"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}"""


class Tokens:
    """Windows of a text file, in the tokens of a model's own tokenizer."""

    def __init__(self, directory: str, file: str, seq_len: int):
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self._ids = torch.tensor(tokenizer(Path(file).read_text())["input_ids"])
        self._seq_len = seq_len

    def __len__(self) -> int:
        return (len(self._ids) - 1) // self._seq_len

    def __getitem__(self, window: int) -> Tensor:
        return self._ids[window * self._seq_len :][: self._seq_len + 1]


@dataclass(frozen=True, kw_only=True)
class Finetune(et.Task):
    """Next-token prediction with any causal model that transformers builds from a configuration."""

    config: str  # JSON
    tokenizer: str  # a directory that has one; none: the data is read as bytes
    data: str
    seq_len: int
    lr: float

    def model(self) -> nn.Module:
        settings = json.loads(self.config) | {"use_cache": False, "attn_implementation": "eager"}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))

    def parallelize(self) -> et.Rules:
        with torch.device("meta"):
            return rules_of(self.model())

    def init(self, module: nn.Module, fqn: str) -> None:
        """As transformers does it for most models: normal weights, zero biases, scales of one."""
        if dict(module.named_buffers(recurse=False)):  # rotary frequencies, made by their module
            for name, value in type(module)(module.config).named_buffers(recurse=False):
                getattr(module, name).copy_(value)
        for name, tensor in module.named_parameters(recurse=False):
            fill = nn.init.ones_ if "norm" in fqn.lower() and name == "weight" else nn.init.zeros_
            nn.init.normal_(tensor, std=0.02) if tensor.ndim > 1 else fill(tensor)

    def optimizer(self, named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named_params], lr=self.lr, weight_decay=0.01)

    def dataset(self) -> Numbered | Tokens:
        if self.tokenizer:
            return Tokens(self.tokenizer, self.data, self.seq_len)
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
    workers: str = "1:3",
    storage: str = "./runs",
    name: str = "finetune_hf",
) -> et.ElasticTrainer:
    """Train a Hugging Face causal language model on text."""
    least, _, most = workers.partition(":")
    source, given = Path(config), bool(config)
    text = (source / "config.json").read_text() if given else TINY
    tokenizer = config if given and (source / "tokenizer.json").is_file() else ""
    return et.ElasticTrainer(
        Finetune(config=text, tokenizer=tokenizer, data=data, seq_len=seq_len, lr=lr),
        batch=et.Batch(global_size=global_size, micro_size=micro_size),
        max_steps=max_steps,
        clip_norm=1.0,
        scaling_config=ScalingConfig(num_workers=(int(least), int(most or least))),
        run_config=RunConfig(name=name, storage_path=storage),
        resume_from=config if given and any(source.glob("*.safetensors")) else None,
    )


if __name__ == "__main__":
    et.main(trainer)
