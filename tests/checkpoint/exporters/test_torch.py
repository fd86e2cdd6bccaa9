"""torch reads what we write, and we read what torch writes, to the bit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elastic_train.checkpoint.exporters.dcp import export_dcp
from elastic_train.checkpoint.exporters.hf import export_hf
from elastic_train.checkpoint.exporters.ucp import export_ucp
from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.storage.fsspec_store import open_store
from elastic_train.testing.gloo_pool import GlooPool

pytestmark = pytest.mark.ring2


class Model(nn.Module):
    """Sizes that two ranks can't share equally, a tie and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.up, self.norm = nn.Linear(4, 5), nn.LayerNorm(5)
        self.gate = nn.Linear(5, 1, bias=False)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.gate(self.norm(self.up(self.embed(tokens)))).sum()


def trained(seed: int) -> tuple[Model, torch.optim.AdamW]:
    """A model after two steps under two groups."""
    torch.manual_seed(seed)
    model = Model()
    return model, train(model)


def train(model: nn.Module) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "lr": 0.01}, {"params": parameters[2:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    go_on(model, optimizer)
    return optimizer


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two steps."""
    for _ in range(2):
        model(torch.arange(6)).backward()
        optimizer.step()
        optimizer.zero_grad()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def pool() -> Iterator[GlooPool]:
    with GlooPool(2) as pool:
        yield pool


@pytest.fixture
def quiet() -> Iterator[None]:
    """torch warns of its own deprecations and of single processes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def saved(tmp_path: Path, quiet: None) -> tuple[Path, Model, torch.optim.AdamW]:
    """A state that torch saved from one process."""
    model, optimizer = trained(0)
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "step": 2, "note": {"a": [1, None], "b": "ü"}}
    dcp.save(state, checkpoint_id=tmp_path / "torch", no_dist=True)
    return tmp_path / "torch", model, optimizer


def check(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The checkpoint holds the model and the optimizer to the bit, by name."""
    names = {id(p): name for name, p in model.named_parameters()}
    for name, tensor in model.state_dict().items():
        assert checkpoint.read(name, "param").tobytes() == bits(tensor), name
    kept = checkpoint.document["optimizer"]
    for parameter, states in optimizer.state.items():
        name = names[id(parameter)]
        assert kept["scalars"][name]["step"] == {"value": states["step"].item(), "dtype": "float32"}
        for state in ("exp_avg", "exp_avg_sq"):
            assert checkpoint.read(name, state).tobytes() == bits(states[state]), (name, state)
    assert len(kept["groups"]) == len(optimizer.param_groups)
    for found, group in zip(kept["groups"], optimizer.param_groups, strict=True):
        assert found["params"] == [names[id(p)] for p in group["params"]]
        assert found["hyperparameters"]["lr"] == group["lr"]
        assert found["hyperparameters"]["weight_decay"] == group["weight_decay"]


def test_what_torch_saved_is_read(saved: tuple[Path, Model, torch.optim.AdamW]) -> None:
    directory, model, optimizer = saved
    checkpoint = open_checkpoint(str(directory))
    check(checkpoint, model, optimizer)
    assert checkpoint.document["step"] == 2
    assert checkpoint.document["foreign"]["objects"]["note.b"] == "ü"


def test_torch_loads_what_was_exported_with_the_optimizer(
    saved: tuple[Path, Model, torch.optim.AdamW], tmp_path: Path
) -> None:
    directory, model, optimizer = saved
    export_dcp(open_checkpoint(str(directory)), open_store(str(tmp_path / "out")), limit=64)
    other, its = trained(1)
    weights, states = get_state_dict(other, its)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    check(open_checkpoint(str(directory)), other, its)
    assert bits(other.embed.weight) == bits(model.embed.weight)
    assert its.param_groups[1]["betas"] == optimizer.param_groups[1]["betas"]
    check(open_checkpoint(str(tmp_path / "out")), model, optimizer)
    for trainee, its_own in ((model, optimizer), (other, its)):
        go_on(trainee, its_own)
    for (name, one), two in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert bits(one) == bits(two), f"{name} after two more steps in torch"


KINDS = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.bool, torch.complex64),
]


def test_every_dtype_shape_and_layout_is_read(tmp_path: Path, quiet: None) -> None:
    generator = torch.Generator().manual_seed(0)
    state: dict[str, torch.Tensor] = {}
    for kind in KINDS:
        values = torch.rand((6, 4), generator=generator, dtype=torch.float64) * 5
        name = str(kind).removeprefix("torch.")
        state[f"{name}.plain"] = values.to(kind)
        state[f"{name}.number"] = values[0, 0].to(kind)
        state[f"{name}.empty"] = values[:0].to(kind)
        state[f"{name}.turned"] = values.to(kind).t()
        state[f"{name}.view"] = values.to(kind)[1:5, 1:3]
    dcp.save({"model": state}, checkpoint_id=tmp_path / "torch", no_dist=True)
    checkpoint = open_checkpoint(str(tmp_path / "torch"))
    assert {tensor for tensor, _ in checkpoint.tensors} == set(state)
    for name, tensor in state.items():
        assert checkpoint.info(name, "param").shape == tuple(tensor.shape)
        assert checkpoint.info(name, "param").dtype == name.partition(".")[0]
        assert checkpoint.read(name, "param").tobytes() == bits(tensor), name


def test_hugging_face_files_are_loaded_by_their_own_library(
    saved: tuple[Path, Model, torch.optim.AdamW], tmp_path: Path
) -> None:
    directory, model, _ = saved
    export_hf(open_checkpoint(str(directory)), open_store(str(tmp_path / "out")), dtype="bfloat16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        wanted = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert bits(found[name]) == bits(wanted), name


def test_universal_files_are_loaded_by_torch(
    saved: tuple[Path, Model, torch.optim.AdamW], tmp_path: Path
) -> None:
    directory, model, optimizer = saved
    export_ucp(open_checkpoint(str(directory)), open_store(str(tmp_path / "out")))
    root = tmp_path / "out" / (tmp_path / "out" / "latest_universal").read_text()
    for name, parameter in model.named_parameters():
        atom = torch.load(root / "zero" / name / "fp32.pt", weights_only=True)
        assert bits(atom["param"]) == bits(parameter)
        step = torch.load(root / "zero" / name / "step.pt", weights_only=True)
        assert step == optimizer.state[parameter]["step"]
        moment = torch.load(root / "zero" / name / "exp_avg.pt", weights_only=True)["param"]
        assert bits(moment) == bits(optimizer.state[parameter]["exp_avg"])
    states = torch.load(root / "mp_rank_00_model_states.pt", weights_only=True)
    assert [list(group) for group in states["param_shapes"]] == [
        ["embed.weight", "up.weight"],
        ["up.bias", "norm.weight", "norm.bias", "gate.weight"],
    ]
    settings = torch.load(root / "zero" / "optimizer_state.pt", weights_only=True)
    assert [group["lr"] for group in settings["param_groups"]] == [0.01, 0.1]


def save_sharded(state: dict[str, Any], host: str, port: int, directory: str) -> dict[str, bytes]:
    """Train under FSDP on two ranks, save in both forms, and return the whole state."""
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("dcp", store), rank=state["index"], world_size=2)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    optimizer = train(model)
    weights, states = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=f"{directory}/torch")
    only_parameters = {k: v for k, v in weights.items() if k != "count"}
    writer = HuggingFaceStorageWriter(f"{directory}/hf", save_distributed=True)
    dcp.save(only_parameters, storage_writer=writer)
    whole = {(name, "param"): tensor for name, tensor in weights.items()}
    whole |= {(name, s): t for name, own in states["state"].items() for s, t in own.items() if t.ndim}
    found = {k: bits(t.full_tensor() if hasattr(t, "full_tensor") else t) for k, t in whole.items()}
    dist.destroy_process_group()
    return found


def test_blocks_of_two_ranks_are_one_tensor(pool: GlooPool, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    found, _ = pool.run(save_sharded, pool.store_host, pool.store_port, str(tmp_path), timeout=120)
    checkpoint = open_checkpoint(str(tmp_path / "torch"))
    assert set(checkpoint.tensors) == set(found)
    for (name, state), wanted in found.items():
        assert checkpoint.read(name, state).tobytes() == wanted, (name, state)
    assert len(checkpoint.manifest) > len(found)
    np.testing.assert_array_equal(
        checkpoint["embed.weight"]["exp_avg"][3:5], checkpoint.read("embed.weight", "exp_avg")[3:5]
    )
    blocks = open_checkpoint(str(tmp_path / "hf"))
    assert set(blocks.tensors) == {n for n in found if n[1] == "param" and n[0] != "count"}
    for name, state in blocks.tensors:
        assert blocks.read(name, state).tobytes() == found[name, state], name
