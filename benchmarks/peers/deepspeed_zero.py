"""DeepSpeed's own checkpoints: training that writes one, its converters, and training that goes on from one.

python -m benchmarks.peers.deepspeed_zero [--ranks N] train [DIRECTORY] --stage S ...
python -m benchmarks.peers.deepspeed_zero universal|whole FROM TO

`train` starts its ranks over gloo. What is said at the end is one line of JSON. Needs deepspeed and torch
alone. The model is that of the fixtures, of any size, with two groups of parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.run import main as torchrun
from torch.nn import functional as F

FROZEN, BUFFER = 3.0, 7.0
"""Values that no initialization gives: a load that leaves them out is seen."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.ln1(x)).unsqueeze(1).chunk(3, dim=-1)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Model(nn.Module):
    def __init__(self, asked: argparse.Namespace) -> None:
        super().__init__()
        width = asked.width
        self.emb, self.pos = nn.Embedding(asked.vocabulary, width), nn.Embedding(asked.length, width)
        self.h = nn.ModuleList([Block(width) for _ in range(asked.layers)])
        self.lnf, self.head = nn.LayerNorm(width), nn.Linear(width, asked.vocabulary, bias=False)
        self.register_buffer("scale", torch.ones(3))
        if asked.tie:
            self.head.weight = self.emb.weight
        if asked.freeze:
            self.pos.weight.requires_grad = False

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens) + self.pos.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(self.lnf(x)).float().flatten(0, 1), targets.flatten())


def train(asked: argparse.Namespace) -> dict[str, Any]:
    """Go on from `--load`, or begin; run the steps, save in DIRECTORY if there is one."""
    # Kernels for shared memory would be compiled first; gloo does what they do.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model(asked)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1, "lr": 1e-3},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "lr": 5e-4},
    ]
    deepspeed.init_distributed(dist_backend="gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, betas=(0.9, 0.95)),
        config={
            "train_batch_size": asked.batch,
            "train_micro_batch_size_per_gpu": asked.batch // ranks,
            "zero_optimization": {
                "stage": asked.stage,
                "stage3_param_persistence_threshold": 0,
                "sub_group_size": asked.sub_group,
            },
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            "checkpoint": {"load_universal": asked.universal},
        },
    )
    if asked.load:
        engine.load_checkpoint(asked.load)
    losses = []
    for step in range(engine.global_steps, asked.steps):
        drawn = torch.Generator().manual_seed(1000 + step)
        rows = torch.randint(0, asked.vocabulary, (asked.batch, asked.length + 1), generator=drawn)
        own = rows.chunk(ranks)[rank]
        loss = engine(own[:, :-1], own[:, 1:])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
    if asked.poke:
        engine.module.scale.fill_(BUFFER)
        with _whole(engine.module.pos.weight):
            engine.module.pos.weight.data.fill_(FROZEN)
    if asked.directory:
        engine.save_checkpoint(asked.directory, client_state={"cursor": asked.steps})
    with _whole(engine.module.pos.weight):
        frozen = engine.module.pos.weight.detach().flatten()[:3].tolist()
    groups = [{key: g[key] for key in ("lr", "weight_decay")} for g in engine.optimizer.param_groups]
    buffer = engine.module.scale.tolist()
    return {"rank": rank, "losses": losses, "groups": groups, "buffer": buffer, "frozen": frozen}


def universal(asked: argparse.Namespace) -> dict[str, Any]:
    """`ds_to_universal` with its own numbers of processes; its seconds do not count imports."""
    from deepspeed.checkpoint import ds_to_universal

    flags = ["ds_to_universal", "--input_folder", asked.source, "--output_folder", asked.target]
    sys.argv = [*flags, "--inject_missing_state"]
    given = ds_to_universal.parse_arguments()
    began = time.perf_counter()
    ds_to_universal.main(given)
    return {"seconds": time.perf_counter() - began}


def whole(asked: argparse.Namespace) -> dict[str, Any]:
    """`zero_to_fp32`: one file of all parameters."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    began = time.perf_counter()
    found = get_fp32_state_dict_from_zero_checkpoint(asked.source)
    torch.save({name: tensor.detach().clone() for name, tensor in found.items()}, asked.target)
    return {"seconds": time.perf_counter() - began}


def _whole(parameter: nn.Parameter) -> Any:
    """ZeRO-3 gathers a parameter within; others hold it."""
    held = [parameter] if hasattr(parameter, "ds_id") else []
    return deepspeed.zero.GatheredParameters(held, modifier_rank=0)


def _start(asked: argparse.Namespace) -> None:
    """This program again, once per rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ["--nproc-per-node", str(asked.ranks), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    torchrun([*place, "-m", "benchmarks.peers.deepspeed_zero", *sys.argv[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("directory", nargs="?", type=Path)
    for name, default in (("stage", 1), ("steps", 4), ("batch", 8), ("sub_group", 10**9)):
        training.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("width", 32), ("layers", 2), ("vocabulary", 101), ("length", 16)):
        training.add_argument(f"--{name}", type=int, default=default)
    training.add_argument("--load", type=Path)
    for name in ("tie", "freeze", "poke", "universal"):
        training.add_argument(f"--{name}", action="store_true")
    for name in ("universal", "whole"):
        converting = commands.add_parser(name)
        converting.add_argument("source")
        converting.add_argument("target")
    asked = parser.parse_args()
    if asked.command == "train" and "RANK" not in os.environ:
        _start(asked)
        return
    said = {"train": train, "universal": universal, "whole": whole}[asked.command](asked)
    if not said.get("rank"):
        print("RESULT " + json.dumps(said), flush=True)
    if asked.command == "train":
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
