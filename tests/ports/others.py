"""Ports of a graph network, of a policy that plays, and of waves that L-BFGS fits."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.ports.script import Script

# -- a graph -------------------------------------------------------------------------------------------------

NODES, VALIDATED = 500, 100


def graph() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    features, labels, edges = importlib.import_module("graph2").load_cora()
    return features.double(), labels, edges.double()


def network(width: int) -> nn.Module:
    return importlib.import_module("graph2").GCN(width, 16, 7, True, 0.5)


def gcn(ctx: Any) -> None:
    features, labels, edges = graph()
    net = ctx.model("gcn", partial(network, features.size(1)))
    ctx.optimizer("adam", torch.optim.Adam, net, lr=0.01, weight_decay=5e-4)

    def test(nodes: torch.Tensor) -> dict[str, Any]:
        output = net(features, edges)[nodes]
        right = output.argmax(1) == labels[nodes]
        return {
            "val_loss": (F.nll_loss(output, labels[nodes], reduction="sum"), len(nodes)),
            "val_acc": (right.sum(), len(nodes)),
        }

    held_out = list(torch.arange(NODES, NODES + VALIDATED))
    for batch in ctx.batches(list(torch.arange(NODES))):
        if ctx.at and ctx.at % 2 == 0:
            ctx.report(**ctx.evaluate(held_out, test))
        with ctx.step() as step:
            for nodes in batch:
                step.backward(F.nll_loss(net(features, edges)[nodes], labels[nodes]))


def gcn_script(script: Script) -> None:
    features, labels, edges = graph()
    net = script.model("gcn", partial(network, features.size(1)))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
    held_out = slice(NODES, NODES + VALIDATED)
    for batch in script.batches(list(torch.arange(NODES))):
        optimizer.zero_grad()
        (loss,) = (F.nll_loss(net(features, edges)[nodes], labels[nodes]) for nodes in batch)
        loss.backward()
        optimizer.step()
        script.losses.append(float(loss.detach()))
        if batch.step % 2 == 0 and batch.step < script.steps:
            with torch.no_grad():
                output = net.eval()(features, edges)[held_out]
            net.train()
            right = (output.argmax(1) == labels[held_out]).double().mean()
            script.tell(batch.step, val_loss=F.nll_loss(output, labels[held_out]), val_acc=right)


# -- a policy that plays -------------------------------------------------------------------------------------


class Running:
    """The running mean of rewards, by which the program ends."""

    def __init__(self) -> None:
        self.reward = 10.0

    def state_dict(self) -> dict[str, float]:
        return {"reward": self.reward}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.reward = state["reward"]


def played(policy: Any, seed: int) -> tuple[torch.Tensor, float]:
    """An episode: the loss of its actions, and its reward."""
    port = importlib.import_module("reinforce")
    game = port.CartPole()
    state, total, over = game.reset(seed), 0.0, False
    while not over:
        state, reward, fell, late = game.step(port.select_action(policy, state))
        policy.rewards.append(reward)
        total, over = total + reward, fell or late
    return port.finish_episode(policy, 0.99), total


def reinforce(ctx: Any) -> None:
    policy = ctx.model("policy", importlib.import_module("reinforce").Policy)
    ctx.optimizer("adam", torch.optim.Adam, policy, lr=1e-2)
    running = ctx.register("running", Running())
    for batch in ctx.batches(list(range(1000))):  # seeds of episodes
        with ctx.step(metrics=("reward",)) as step:
            for seeds in batch:
                loss, reward = played(policy, int(seeds))
                step.backward(loss, 1)
                step.measure(reward=(reward, 1))
        running.reward = 0.05 * step.metrics["reward"] + 0.95 * running.reward
        ctx.report(reward=step.metrics["reward"], running=running.reward)
        if running.reward > 475.0:
            return


def reinforce_script(script: Script) -> None:
    policy = script.model("policy", importlib.import_module("reinforce").Policy)
    optimizer, running = torch.optim.Adam(policy.parameters(), lr=1e-2), 10.0
    for batch in script.batches(list(range(1000))):
        optimizer.zero_grad()
        for seeds in batch:
            loss, reward = played(policy, int(seeds))
            loss.backward()
        optimizer.step()
        running = 0.05 * reward + 0.95 * running
        script.losses.append(float(loss.detach()))
        script.tell(batch.step, reward=reward, running=running)


# -- waves ---------------------------------------------------------------------------------------------------

FUTURE = 10


def waves(ctx: Any) -> None:
    port = importlib.import_module("timeseq")
    net = ctx.model("sequence", port.build)
    optimizer = ctx.optimizer("lbfgs", torch.optim.LBFGS, net, lr=0.8, max_iter=5)
    data = port.waves(L=30)

    def test(micro: Any) -> dict[str, Any]:
        inputs, targets = micro
        seen = net(inputs, future=FUTURE)[:, :-FUTURE]
        return {"test_loss": ((seen - targets).square().sum(), targets.numel())}

    def compute(step: Any, batch: Any) -> None:
        for inputs, targets in batch:
            step.backward(F.mse_loss(net(inputs), targets))

    for batch in ctx.batches(data[3:]):
        if ctx.at:
            ctx.report(**ctx.evaluate(data[:3], test))
        with ctx.step() as step:
            step.closure(optimizer, partial(compute, step, batch))
    ctx.report(**ctx.evaluate(data[:3], test))


def waves_script(script: Script) -> None:
    """The whole data in one closure, as the program has it."""
    port = importlib.import_module("timeseq")
    net = script.model("sequence", port.build)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.8, max_iter=5)
    data = port.waves(L=30)
    inputs, targets = (torch.stack(each) for each in zip(*data[3:], strict=True))
    held_out, expected = (torch.stack(each) for each in zip(*data[:3], strict=True))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(net(inputs), targets)
        loss.backward()
        return loss

    for step in range(1, script.steps + 1):
        script.losses.append(float(optimizer.step(closure)))  # type: ignore[arg-type]
        with torch.no_grad():
            seen = net(held_out, future=FUTURE)[:, :-FUTURE]
        script.tell(step, test_loss=F.mse_loss(seen, expected))
        assert np.isfinite(script.losses[-1])
