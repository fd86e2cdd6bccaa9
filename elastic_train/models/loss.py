"""The language model's loss as a sum and a count, so that any division of a batch adds up to the whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from elastic_train.data.packing import targets as packed
from elastic_train.data.tokenizer import PAD
from elastic_train.train.model.positions import own_positions, positions_divided


def next_token_loss(
    logits: Tensor, tokens: Tensor, documents: Tensor | None = None, *, ignore_index: int = PAD
) -> tuple[Tensor, Tensor]:
    """Cross entropy of each next token, summed, and the number of tokens that count.

    `logits` [batch, sequence, vocabulary] are the model's output for `tokens` [batch, sequence]: position t
    predicts token t + 1, the last position predicts nothing. Targets equal to `ignore_index` do not count;
    nor, where `documents` numbers each token's, do those of another one.
    Where cp divides the positions, `logits` are of those that are here, and the sum is over these; the last
    one here predicts the first of the next rank.
    The sum is a scalar of at least float32, the count a scalar int64.
    """
    following = tokens[:, 1:] if documents is None else packed(tokens, documents, ignore=ignore_index)
    if positions_divided():
        following = own_positions(F.pad(following, (0, 1), value=ignore_index))
    targets = following.flatten()
    predictions = logits[:, : following.shape[1]].flatten(0, 1)
    predictions = predictions.to(torch.promote_types(predictions.dtype, torch.float32))
    total = F.cross_entropy(predictions, targets, ignore_index=ignore_index, reduction="sum")
    return total, (targets != ignore_index).sum()
