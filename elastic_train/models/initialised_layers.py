"""Layers that know their own initialisation, so that each can be built alone from the meta device."""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """A projection without bias, drawn from a normal distribution."""

    def __init__(self, inputs: int, outputs: int, *, std: float):
        self.std = std  # before the parent's constructor, which calls reset_parameters
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """A table of vectors, drawn from a normal distribution."""

    def __init__(self, rows: int, dim: int, *, std: float):
        self.std = std
        super().__init__(rows, dim)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


def residual_std(inputs: int, layers: int) -> float:
    """Scale of a projection onto the residual stream, which 2 * layers of them are added to.

    Keeps the variance of the stream independent of depth: Radford et al., Language Models are Unsupervised
    Multitask Learners, 2019, section 2.3.
    """
    return (2.0 * layers * inputs) ** -0.5
