"""The byte tokenizer: every text has tokens, none is unknown, and there is no vocabulary to ship."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

BOS = 256
EOS = 257
PAD = 258
VOCABULARY = 259
"""Token ids: 0 .. 255 are bytes, then begin, end and padding."""


def encode(text: str | bytes, *, bos: bool = False, eos: bool = False) -> npt.NDArray[np.int64]:
    """Token ids of a text, its UTF-8 bytes; [n] or with one more for each marker asked for."""
    data = text.encode() if isinstance(text, str) else text
    head, tail = [BOS] if bos else [], [EOS] if eos else []
    return np.concatenate([head, np.frombuffer(data, dtype=np.uint8), tail]).astype(np.int64)


def decode(tokens: Iterable[int]) -> str:
    """The text of token ids; markers and padding vanish, bytes that are no UTF-8 become U+FFFD."""
    return bytes(token for token in map(int, tokens) if token < BOS).decode(errors="replace")
