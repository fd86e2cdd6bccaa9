"""Train a Hugging Face text classifier, from a local directory, on lines of JSON. Needs transformers.

python jobs/classify_hf.py --config my_model --data reviews.jsonl --labels 2

Lines have a "text" and a "label", a number. Weights in the directory are where training starts from, its
tokenizer reads the text; without them the weights are new and the text is bytes. Without data it tells
comments of the standard library's source from code. Texts are padded to the longest of their micro-batch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ray.train import RunConfig, ScalingConfig
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import elastic_train as et
from elastic_train.data.jsonl import JsonLines
from elastic_train.data.numbered import NumberedSamples
from elastic_train.data.sample_range import SourcePart
from elastic_train.data.stdlib import StandardLibrary
from elastic_train.data.tokenizer import PAD, encode
from elastic_train.models.hugging_face import files_of

# A model for trying the job out; it reads bytes.
TINY = """{"model_type": "bert", "vocab_size": 259, "pad_token_id": 258, "hidden_size": 32,
"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}"""


@dataclass(frozen=True, kw_only=True)
class Classify(et.Task):
    """Cross entropy per text, with any classifier that transformers builds."""

    config: str  # JSON
    weights: str  # a directory that has them; none: they are new
    tokenizer: str  # a directory that has one; none: the text is read as bytes
    data: str
    labels: int
    length: int  # tokens of a text at most
    held_out: int  # lines at the end that are evaluated and never trained
    lr: float

    def model(self) -> nn.Module:
        if self.weights:
            return AutoModelForSequenceClassification.from_pretrained(self.weights, num_labels=self.labels)
        config = AutoConfig.for_model(**json.loads(self.config), num_labels=self.labels)
        return AutoModelForSequenceClassification.from_config(config)

    def optimizer(self, named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named_params], lr=self.lr, weight_decay=0.01)

    def dataset(self) -> NumberedSamples:
        return SourcePart(self._lines(), 0, -self.held_out)

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        texts = [sample["text"] for sample in samples]
        label = torch.tensor([int(sample["label"]) for sample in samples])
        if not self.tokenizer:
            return {**_bytes(texts, self.length), "label": label}
        made = _tokenizer(self.tokenizer)(
            texts, padding=True, truncation=True, max_length=self.length, return_tensors="pt"
        )
        return {**made, "label": label}

    def loss(self, output: Any, micro_batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return F.cross_entropy(output.logits, micro_batch["label"], reduction="sum"), len(output.logits)

    def evaluation(self) -> et.Evaluation:
        held_out = SourcePart(self._lines(), -self.held_out)
        return et.Evaluation(dataset=held_out, metric=accuracy, every=50)

    def _lines(self) -> NumberedSamples:
        return JsonLines(self.data, fields=["text", "label"]) if self.data else comments_and_code()


def accuracy(output: Any, micro_batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    """Texts whose most likely label is theirs."""
    right = output.logits.argmax(-1) == micro_batch["label"]
    return {"accuracy": (right.sum(), len(right))}


def comments_and_code(lines: int = 4000) -> list[dict[str, Any]]:
    """Lines of the standard library's source: 1 for a comment, without its mark, and 0 for code."""
    found: list[dict[str, Any]] = []
    for file in StandardLibrary(max_bytes=400_000).files():
        for line in Path(file.url).read_text(errors="replace").splitlines():
            bare = line.strip()
            if text := bare.lstrip("# "):
                found.append({"text": text, "label": int(bare.startswith("#"))})
    return found[:lines]


def _bytes(texts: Sequence[str], length: int) -> dict[str, Tensor]:
    rows = [encode(text, bos=True)[:length] for text in texts]
    ids = torch.full((len(rows), max(map(len, rows))), PAD)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.from_numpy(row)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


@functools.cache
def _tokenizer(directory: str) -> Any:
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def trainer(
    *,
    config: str = "",  # a directory
    data: str = "",
    labels: int = 2,
    length: int = 64,
    held_out: int = 100,
    global_size: int = 24,
    micro_size: int = 4,
    max_steps: int = 100,
    lr: float = 1e-3,
    workers: str = "1:3",
    storage: str = "./runs",
    name: str = "classify_hf",
) -> et.ElasticTrainer:
    """Train a Hugging Face text classifier."""
    least, _, most = workers.partition(":")
    source = Path(config)
    return et.ElasticTrainer(
        Classify(
            config=(source / "config.json").read_text() if config else TINY,
            weights=config if config and files_of(config) else "",
            tokenizer=config if config and (source / "tokenizer.json").is_file() else "",
            **{"data": data, "labels": labels, "length": length, "held_out": held_out, "lr": lr},
        ),
        batch=et.Batch(global_size=global_size, micro_size=micro_size),
        max_steps=max_steps,
        clip_norm=1.0,
        scaling_config=ScalingConfig(num_workers=(int(least), int(most or least))),
        run_config=RunConfig(name=name, storage_path=storage),
    )


if __name__ == "__main__":
    et.main(trainer)
