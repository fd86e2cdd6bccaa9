"""Ports of programs about text: the word language model, recurrent and as a transformer, and minGPT."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.ports.script import Script

WORDS, COLUMNS, VALIDATION_COLUMNS, PIECE = 30, 8, 4, 7
WIDTH, LAYERS, RATE = 16, 2, 5.0


def columns(count: int, seed: int, width: int) -> torch.Tensor:
    """Words of a small Markov chain, cut into `width` columns: [length, width]."""
    port = importlib.import_module("wlm")
    return port.batchify(port.corpus(count, seed) % WORDS, width)


class Pieces:
    """Sample `k * columns + c` is the k-th piece of column c, of at most `PIECE` words, and what follows."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words

    def __len__(self) -> int:
        return -(-(len(self.words) - 1) // PIECE) * self.words.size(1)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece, column = divmod(number, self.words.size(1))
        words = self.words[piece * PIECE : (piece + 1) * PIECE + 1, column]
        return words[:-1], words[1:]


class Columns:
    """A sample is a whole column."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words

    def __len__(self) -> int:
        return self.words.size(1)

    def __getitem__(self, column: int) -> torch.Tensor:
        return self.words[:, column]


def pieces(words: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of columns [length, width]: inputs [PIECE, width] and what follows them, flat."""
    for start in range(0, len(words) - 1, PIECE):
        part = words[start : start + PIECE + 1]
        yield part[:-1], part[1:].reshape(-1)


TRAINED = (48 * COLUMNS, 1, COLUMNS)
"""Seven pieces a column, the last of which is shorter."""
HELD_OUT = (20 * VALIDATION_COLUMNS, 2, VALIDATION_COLUMNS)


def made(kind: str) -> nn.Module:
    models = importlib.import_module("wlm_model")
    if kind == "Transformer":
        return models.TransformerModel(WORDS, WIDTH, 2, WIDTH, LAYERS, 0.2)
    return models.RNNModel(kind, WORDS, WIDTH, WIDTH, LAYERS, 0.2)


def validation(model: Any, words: torch.Tensor, kind: str) -> torch.Tensor:
    """The sum over all words of columns [length, width]; what is hidden goes from piece to piece."""
    hidden = None if kind == "Transformer" else model.init_hidden(words.size(1))
    total = torch.zeros(())
    for inputs, targets in pieces(words):
        if hidden is None:
            output = model(inputs).view(-1, WORDS)
        else:
            output, hidden = model(inputs, hidden)
        total = total + nn.functional.nll_loss(output, targets, reduction="sum")
    return total


class Annealed:
    """The best loss of the validations so far; 0 before the first."""

    def __init__(self) -> None:
        self.best = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.best = state["best"]


def words(ctx: Any, kind: str) -> None:
    model = ctx.model("lm", partial(made, kind))
    optimizer = ctx.optimizer("sgd", torch.optim.SGD, model, lr=RATE)
    annealed = ctx.register("annealed", Annealed())
    rows = torch.zeros(LAYERS, COLUMNS, WIDTH, dtype=torch.float64)
    names = {"LSTM": ("h", "c"), "GRU": ("h",)}.get(kind, ())
    hidden = [ctx.carry(name, rows, dim=1) for name in names]
    train, held_out = columns(*TRAINED), Columns(columns(*HELD_OUT))

    def metric(micro: torch.Tensor) -> dict[str, Any]:
        return {"val_loss": (validation(model, micro.t(), kind), micro.size(0) * (micro.size(1) - 1))}

    def validate() -> None:
        loss = ctx.evaluate(held_out, metric)["val_loss"]
        if not annealed.best or loss < annealed.best:
            annealed.best = loss
        else:
            for group in optimizer.param_groups:
                group["lr"] /= 4.0
        ctx.report(val_loss=loss, val_ppl=math.exp(loss))

    for batch in ctx.batches(Pieces(train)):
        if (batch.step - 1) % batch.steps_per_epoch == 0:
            if ctx.at:
                validate()
            for each in hidden:
                each.value = torch.zeros_like(each.value)
        with ctx.step() as step:
            for inputs, targets in batch:
                if hidden:
                    before = tuple(each.get() for each in hidden)
                    output, after = model(inputs.t(), before if kind == "LSTM" else before[0])
                    for each, value in zip(hidden, after if kind == "LSTM" else (after,), strict=True):
                        each.set(value)
                else:
                    output = model(inputs.t()).view(-1, WORDS)
                step.backward(nn.functional.nll_loss(output, targets.t().reshape(-1)))
    validate()


def words_script(script: Script, kind: str) -> None:
    model = script.model("lm", partial(made, kind))
    rate, best = RATE, 0.0
    held_out = columns(*HELD_OUT)
    state: list[Any] = []
    for batch in script.batches(Pieces(columns(*TRAINED))):
        if (batch.step - 1) % batch.steps_per_epoch == 0 and kind != "Transformer":
            state = [model.init_hidden(script.batch.micro_size) for _ in batch.samples]
        model.zero_grad()
        loss = 0.0
        for number, (inputs, targets) in enumerate(batch):
            if state:
                output, after = model(inputs.t(), state[number])
                state[number] = tuple(h.detach() for h in after) if kind == "LSTM" else after.detach()
            else:
                output = model(inputs.t()).view(-1, WORDS)
            part = nn.functional.nll_loss(output, targets.t().reshape(-1)) * (len(inputs) / batch.size)
            part.backward()
            loss += float(part.detach())
        script.clip(model)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-rate)
        script.losses.append(loss)
        if batch.ends_epoch:
            with torch.no_grad():
                found = float(validation(model.eval(), held_out, kind)) / (held_out[1:].numel())
            model.train()
            rate, best = (rate, found) if not best or found < best else (rate / 4.0, best)
            script.tell(batch.step, val_loss=found, val_ppl=math.exp(found))


# -- minGPT --------------------------------------------------------------------------------------------------

BLOCK, LETTERS = 12, "elastic training goes on where it was, and a step is there for all or for none. "


class Letters:
    """Each sample is a window of a text and the same one letter on."""

    def __init__(self) -> None:
        known = sorted(set(LETTERS))
        self.size, self.text = len(known), torch.tensor([known.index(letter) for letter in LETTERS])

    def __len__(self) -> int:
        return len(self.text) - BLOCK

    def __getitem__(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.text[start : start + BLOCK + 1]
        return window[:-1], window[1:]


def gpt(size: int) -> nn.Module:
    port = importlib.import_module("mingpt_model")
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": size, "block_size": BLOCK}
    return port.GPT(port.GPTConfig(model_type=None, **shape))


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """The program's own function, which makes two groups of a model."""
    port = importlib.import_module("mingpt_model")
    return port.create_optimizer(model, port.OptimizerConfig(learning_rate=3e-3))


def mingpt(ctx: Any) -> None:
    data = Letters()
    model = ctx.model("gpt", partial(gpt, data.size))
    ctx.optimizer("adamw", lambda _: grouped(model), model)
    for batch in ctx.batches(data):
        with ctx.step() as step:
            for inputs, targets in batch:
                step.backward(model(inputs, targets)[1])


def mingpt_script(script: Script) -> None:
    data = Letters()
    model = script.model("gpt", partial(gpt, data.size))
    optimizer = grouped(model)
    for batch in script.batches(data):
        optimizer.zero_grad()
        loss = 0.0
        for inputs, targets in batch:
            part = model(inputs, targets)[1] * (len(inputs) / batch.size)
            part.backward()
            loss += float(part.detach())
        script.clip(model)
        optimizer.step()
        script.losses.append(loss)
