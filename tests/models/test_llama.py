"""The shipped language model against naive references, and its build from the meta device."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from elastic_train.data.tokenizer import PAD
from elastic_train.errors import ConfigError
from elastic_train.models.attention import Attention
from elastic_train.models.llama import Llama
from elastic_train.models.loss import next_token_loss
from elastic_train.models.rope import Rope
from elastic_train.models.sizes import LlamaConfig, size

pytestmark = pytest.mark.ring2

NANO = size("nano")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def tokens(batch: int = 2, sequence: int = 9) -> Tensor:
    return torch.randint(0, 256, (batch, sequence))


def reset_each(model: nn.Module) -> None:
    """What the engine does: each module that owns tensors alone, under a seed of its own."""
    for fqn, module in model.named_modules():
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            torch.manual_seed(zlib.crc32(fqn.encode()))
            module.reset_parameters()  # type: ignore[operator]


def naive_attention(attention: Attention, x: Tensor, config: LlamaConfig) -> Tensor:
    """Every head written out, key and value heads looked up by the query head's number."""
    width, outputs = config.head_dim, []
    group = config.heads // config.kv_heads
    for head in range(config.heads):
        rows = slice(head * width, (head + 1) * width)
        shared = slice(head // group * width, (head // group + 1) * width)
        q = attention.mix.rope((x @ attention.wq.weight[rows].T)[:, :, None])[:, :, 0]
        k = attention.mix.rope((x @ attention.wk.weight[shared].T)[:, :, None])[:, :, 0]
        scores = q @ k.transpose(1, 2) / math.sqrt(width)
        future = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), diagonal=1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        outputs.append(weights @ (x @ attention.wv.weight[shared].T))
    return torch.cat(outputs, dim=-1) @ attention.wo.weight.T


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_attention_equals_every_head_written_out(kv_heads: int):
    config = replace(NANO, kv_heads=kv_heads)
    attention = Attention(config).double()
    x = torch.randn(3, 11, config.dim, dtype=torch.float64)
    torch.testing.assert_close(attention(x), naive_attention(attention, x, config), rtol=1e-10, atol=1e-10)


def test_rotated_products_depend_on_the_distance_alone():
    rope = Rope(8, theta=100.0).double()
    q, k = torch.randn(2, 8, dtype=torch.float64)
    many_q, many_k = rope(q.expand(1, 12, 1, 8))[0, :, 0], rope(k.expand(1, 12, 1, 8))[0, :, 0]
    products = many_q @ many_k.T
    for distance in range(-5, 6):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    torch.testing.assert_close(many_q[0], q)
    torch.testing.assert_close(many_q.norm(dim=-1), q.norm().expand(12))


def test_logits_have_a_row_per_token_and_see_no_future():
    model = Llama(NANO)
    ids = tokens()
    logits = model(ids)
    assert logits.shape == (2, 9, NANO.vocabulary)
    changed = ids.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 256
    torch.testing.assert_close(model(changed)[:, :6], logits[:, :6])
    assert not torch.allclose(model(changed)[:, 6:], logits[:, 6:])


def test_a_fresh_model_predicts_close_to_uniformly():
    ids = tokens(8, 33)
    total, count = next_token_loss(Llama(NANO)(ids), ids)
    assert abs(total.item() / count.item() - math.log(NANO.vocabulary)) < 0.1


@pytest.mark.parametrize("name", ["nano", "tiny", "small", "base", "medium", "large"])
def test_every_size_builds_on_the_meta_device(name: str):
    with torch.device("meta"):
        model = Llama(size(name))
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert [int(fqn.split(".")[1]) for fqn, _ in model.named_modules() if fqn.endswith("attention")] == list(
        range(model.config.layers)
    )


@pytest.mark.parametrize("tied", [False, True])
def test_modules_reset_one_by_one_define_every_value_by_their_own_seed(tied: bool):
    config = replace(NANO, tied=tied)
    with torch.device("meta"):
        meta = Llama(config)
    meta.to_empty(device="cpu")
    for tensor in [*meta.parameters(), *meta.buffers()]:
        tensor.data.fill_(7e7)
    reset_each(meta)
    direct = Llama(config)
    reset_each(direct)
    if tied:
        meta.head.weight = (
            meta.embed.weight
        )  # materialising replaces parameters, so the owner ties them again
        torch.manual_seed(zlib.crc32(b"head"))
        meta.head.reset_parameters()
    ours = dict([*meta.named_parameters(), *meta.named_buffers()])
    theirs = dict([*direct.named_parameters(), *direct.named_buffers()])
    assert ours.keys() == theirs.keys()
    for fqn, tensor in ours.items():
        assert torch.equal(tensor, theirs[fqn]), fqn
    ids = tokens()
    assert torch.equal(meta(ids), direct(ids))


def test_a_reset_module_ignores_what_was_drawn_before_its_seed():
    first, second = Llama(NANO), Llama(NANO)
    torch.manual_seed(5)
    first.layers[1].attention.wq.reset_parameters()
    torch.rand(100)
    torch.manual_seed(5)
    second.layers[1].attention.wq.reset_parameters()
    assert torch.equal(first.layers[1].attention.wq.weight, second.layers[1].attention.wq.weight)


def test_a_tied_head_is_the_embedding_and_both_uses_reach_its_gradient():
    model = Llama(replace(NANO, tied=True))
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())
    next_token_loss(model(tokens()), tokens())[0].backward()
    assert model.embed.weight.grad is not None
    # Rows of tokens that never occur get a gradient through the head alone.
    assert bool((model.embed.weight.grad[256:].abs().sum(-1) > 0).all())
    assert Llama(NANO).head.weight is not Llama(NANO).embed.weight


def test_a_stage_is_the_model_with_other_parts_replaced_by_identity():
    model = Llama(NANO)
    ids = tokens()
    whole = model(ids)
    first, second = Llama(NANO), Llama(NANO)
    first.load_state_dict(model.state_dict())
    second.load_state_dict(model.state_dict())
    first.layers[1] = first.norm = first.head = nn.Identity()
    second.embed = second.layers[0] = nn.Identity()
    assert torch.equal(second(first(ids)), whole)


def test_dropout_draws_only_in_training():
    model = Llama(replace(NANO, dropout=0.5))
    ids = tokens()
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


def test_loss_sums_over_any_division_of_the_batch_and_ignores_padding():
    model, ids = Llama(NANO).double(), tokens(6, 12)
    ids[2, 7:] = PAD
    ids[5, 1:] = PAD
    whole, count = next_token_loss(model(ids), ids)
    parts = [next_token_loss(model(part), part) for part in (ids[:1], ids[1:4], ids[4:])]
    torch.testing.assert_close(torch.stack([total for total, _ in parts]).sum(), whole)
    assert sum(int(n) for _, n in parts) == int(count) == 4 * 11 + 6 + 0
    nothing, none = next_token_loss(model(ids[5:]), ids[5:])
    assert (nothing.item(), none.item()) == (0.0, 0)


def test_shapes_that_cannot_be_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"model\.kv_heads"):
        replace(NANO, kv_heads=3)
    with pytest.raises(ConfigError, match=r"model\.heads"):
        replace(NANO, heads=5, kv_heads=5)
    with pytest.raises(ConfigError, match="none of nano, tiny"):
        size("huge")
