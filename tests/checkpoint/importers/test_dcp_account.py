"""Each tensor, object and number of a torch.distributed checkpoint is restored or listed, with a reason."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from elastic_train.checkpoint.language.parse import parse
from elastic_train.checkpoint.language.translated_view import as_ours
from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.checkpoint.verify import verify
from elastic_train.errors import FormatUnsupported

pytestmark = [pytest.mark.ring1, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def trained(*sizes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(sizes[0])).sum().backward()
    optimizer.step()
    return net, optimizer


def opened(at: Path, state: dict[str, Any], names: list[str] | None = None) -> Checkpoint:
    dcp.save(state, checkpoint_id=str(at))
    return open_checkpoint(str(at), names=names)


def test_what_torchtitan_keeps_is_the_step_or_listed(tmp_path: Path) -> None:
    net, optimizer = trained(3, 2)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, states = get_state_dict(net, optimizer, options=options)
    checkpoint = opened(
        tmp_path,
        {
            **model,
            "optimizer": states,
            "lr_scheduler": {"last_epoch": 3},
            "train_state": {"step": torch.tensor(20, dtype=torch.int32), "losses": torch.ones(4)},
            "dataloader": {"dp_rank_0": b"abc", "dp_world_size": torch.tensor(8)},
        },
    )
    assert checkpoint.document["step"] == 20
    assert {t for t, _ in checkpoint.tensors} == set(model)
    assert {s for _, s in checkpoint.document["optimizer"]["states"]} == {"exp_avg", "exp_avg_sq"}
    lost = checkpoint.document["foreign"]["not_restored"]
    for key in ("train_state.losses", "dataloader.dp_rank_0", "dataloader.dp_world_size", "lr_scheduler"):
        assert any(line.startswith(key) for line in lost), key
    assert checkpoint.document["foreign"]["objects"]["dataloader.dp_world_size"] == 8


def test_an_optimizer_by_number_gets_names_by_shape(tmp_path: Path) -> None:
    net, optimizer = trained(3, 2)
    checkpoint = opened(tmp_path, {"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    for name, parameter in net.named_parameters():
        for state in ("exp_avg", "exp_avg_sq"):
            expected = optimizer.state[parameter][state].numpy()
            assert np.array_equal(checkpoint.read(name, state), expected)
    assert checkpoint.document["optimizer"]["groups"][0]["params"] == ["0.weight", "0.bias"]
    assert checkpoint.document["optimizer"]["scalars"]["0.bias"]["step"]["value"] == 1.0


def test_an_optimizer_by_number_is_listed_or_named_by_the_caller(tmp_path: Path) -> None:
    net, optimizer = trained(3, 3, 3)
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint = opened(tmp_path / "a", state)
    assert {s for _, s in checkpoint.tensors} == {"param"}
    assert not checkpoint.document["optimizer"]["groups"]
    assert any("--names" in line for line in checkpoint.document["foreign"]["not_restored"])
    named = open_checkpoint(str(tmp_path / "a"), names=[n for n, _ in net.named_parameters()])
    for name, parameter in net.named_parameters():
        assert np.array_equal(named.read(name, "exp_avg"), optimizer.state[parameter]["exp_avg"].numpy())
    assert named.document["foreign"]["assumed"]


def test_a_second_model_is_listed_or_refused(tmp_path: Path) -> None:
    net, _ = trained(3, 2)
    checkpoint = opened(tmp_path / "ema", {"model": net.state_dict(), "ema": net.state_dict()})
    assert set(checkpoint) == set(net.state_dict())
    assert any(line.startswith("ema") for line in checkpoint.document["foreign"]["not_restored"])
    with pytest.raises(FormatUnsupported, match="several models"):
        opened(tmp_path / "two", {"model": net.state_dict(), "state_dict": {"other": torch.ones(2)}})


def test_settings_that_are_tensors_are_settings(tmp_path: Path) -> None:
    net, _ = trained(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.5))
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    model, states = get_state_dict(net, optimizer)
    checkpoint = opened(tmp_path, {"model": model, "optimizer": states})
    assert set(checkpoint) == set(net.state_dict())
    assert checkpoint.document["optimizer"]["groups"][0]["hyperparameters"]["lr"] == 0.5


def test_a_directory_of_accelerate_under_fsdp_is_one_checkpoint(tmp_path: Path) -> None:
    net, optimizer = trained(3, 2)
    model, states = get_state_dict(net, optimizer)
    dcp.save({"model": model}, checkpoint_id=str(tmp_path / "pytorch_model_fsdp_0"))
    dcp.save({"optimizer": states}, checkpoint_id=str(tmp_path / "optimizer_0"))
    torch.save({"last_epoch": 7}, tmp_path / "scheduler.bin")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 7}')
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.document["step"] == 7
    assert checkpoint.document["foreign"]["lr_scheduler"] == {"last_epoch": 7}
    for name, parameter in net.named_parameters():
        assert np.array_equal(checkpoint.read(name, "param"), parameter.detach().numpy())
        assert np.array_equal(checkpoint.read(name, "exp_avg"), optimizer.state[parameter]["exp_avg"].numpy())
    assert verify(checkpoint).sound


def test_moments_of_a_parameter_that_is_kept_in_parts_are_its_own(tmp_path: Path) -> None:
    """As torchtitan keeps a fused projection: its weight as queries, keys and values, its moments whole."""
    heads, kv_heads, size, width = 4, 2, 3, 5
    whole = torch.arange(float((heads + 2 * kv_heads) * size * width)).view(-1, width)
    by_head = whole.view(kv_heads, heads // kv_heads + 2, size, width)
    parts = {
        "a.wq.weight": by_head[:, :-2].reshape(-1, width).contiguous(),
        "a.wk.weight": by_head[:, -2].reshape(-1, width).contiguous(),
        "a.wv.weight": by_head[:, -1].reshape(-1, width).contiguous(),
    }
    flat = {
        "state.a.wqkv.weight.exp_avg": whole + 1,
        "state.a.wqkv.weight.step": torch.tensor(7.0),
        "param_groups.a.wqkv.weight.lr": 0.5,
    }
    checkpoint = opened(tmp_path, {**parts, "optimizer": flat, "train_state": {"step": torch.tensor(7)}})
    rule = {
        "select": [*parts],
        "to": "a.wqkv.weight",
        "operations": [{"op": "fuse", "heads": heads, "kv_heads": kv_heads, "grouped": True}],
        "only": ["param"],
    }
    ours = as_ours(checkpoint, parse({"rule": [rule], "rest": "keep"}))
    assert {t for t, _ in ours.tensors} == {"a.wqkv.weight"}
    assert np.array_equal(ours.read("a.wqkv.weight", "param"), whole.numpy())
    assert np.array_equal(ours.read("a.wqkv.weight", "exp_avg"), whole.numpy() + 1)
    assert ours.document["trainable"] == ["a.wqkv.weight"]
    optimizer = ours.document["optimizer"]
    assert [g["params"] for g in optimizer["groups"]] == [["a.wqkv.weight"]]
    assert optimizer["scalars"]["a.wqkv.weight"]["step"]["value"] == 7.0
    assert optimizer["states"] == [["a.wqkv.weight", "exp_avg"]]
