"""Text in the tokens of a Hugging Face model's own tokenizer. Needs transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer


class Tokens:
    """Windows of a text file, [seq_len + 1] token ids each; neighbours share one."""

    def __init__(self, directory: str, file: str, *, seq_len: int):
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self._ids = torch.tensor(tokenizer(Path(file).read_text())["input_ids"])
        self._seq_len = seq_len

    def __len__(self) -> int:
        return (len(self._ids) - 1) // self._seq_len

    def __getitem__(self, window: int) -> Tensor:
        return self._ids[window * self._seq_len :][: self._seq_len + 1]
