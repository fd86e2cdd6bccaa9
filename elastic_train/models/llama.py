"""A Llama-like causal language model."""

from __future__ import annotations

from torch import Tensor, nn

from elastic_train.models.attention import Attention
from elastic_train.models.document_attention import Within
from elastic_train.models.initialised_layers import Embedding, Linear
from elastic_train.models.mlp import SwiGLU
from elastic_train.models.moe import MixtureOfExperts
from elastic_train.models.sizes import LlamaConfig
from elastic_train.train.task import Rules, Style


class Block(nn.Module):
    """Attention and feed-forward layer, each normalised before and added to the residual stream."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = MixtureOfExperts(config) if config.experts else SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, within: Within | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), within))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Llama(nn.Module):
    """Token ids to logits: Touvron et al., LLaMA, 2023, section 2.2.

    A chain of `embed`, `layers` by their global number, `norm` and `head`. Each part takes one tensor, layers
    where documents are too, and returns one, so a pipeline stage is this module with the other stages' parts
    replaced by the identity.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocabulary, config.dim, std=0.02)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = Linear(config.dim, config.vocabulary, std=0.02)
        if config.tied:
            self.head.weight = self.embed.weight

    @staticmethod
    def rules(*, packed: bool = False, experts: bool = False) -> Rules:
        """tp cuts heads, feed-forward layers and vocabulary, cp positions; stages begin between layers.

        `packed`: the data says of which document a token is, and every stage has to know it. `experts`: the
        model has some, which are cut over ep.
        """
        feed_forward: dict[str, Style] = {
            "layers.*.mlp.gate": "column",
            "layers.*.mlp.up": "column",
            "layers.*.mlp.down": "row",
        }
        return Rules(
            tensor_parallel={
                "embed": "row",
                "layers.*.attention.w[qkv]": "column",
                "layers.*.attention.wo": "row",
                **({} if experts else feed_forward),
                "head": "column_loss",
            },
            sequence={
                "layers.*.attention_norm": "alone",
                "layers.*.attention": "gathered",
                "layers.*.mlp_norm": "alone",
                "layers.*.mlp": "alone" if experts else "gathered",
                "norm": "alone",
                "head": "gathered",
            },
            attention=("layers.*.attention.mix",),
            experts=("layers.*.mlp.experts",) if experts else (),
            stages=("layers.*",),
            beside=("documents",) if packed else (),
        )

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """int64 [batch, sequence] -> logits [batch, sequence, vocabulary].

        With the number of each token's document, [batch, sequence], no token sees another document's.
        """
        x = self.embed(tokens)
        beside = () if documents is None else (Within.of(documents),)
        for layer in self.layers:
            x = layer(x, *beside)
        return self.head(self.norm(x))
