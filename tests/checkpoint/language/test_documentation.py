"""The specification in the documentation is one that works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastic_train.checkpoint.language.parse import KINDS, OPERATIONS, parse
from elastic_train.checkpoint.language.resolve import to_ours, to_theirs
from elastic_train.checkpoint.lazy_arrays import TensorInfo

pytestmark = pytest.mark.ring0

TEXT = (Path(__file__).parents[3] / "docs" / "language.md").read_text()


def test_the_example_maps_a_model_there_and_back() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    spec = parse(example)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (32768, 8),
        "model.layers.0.self_attn.rotary_emb.inv_freq": (4,),
        "model.layers.0.input_layernorm.weight": (8,),
        **{f"model.layers.0.self_attn.{p}_proj.weight": (8, 8) for p in "qkvo"},
        **{f"model.layers.0.mlp.experts.{e}.{p}_proj.weight": (6, 8) for e in (0, 1) for p in ("gate", "up")},
    }
    infos = {(n, "param"): TensorInfo(dtype="float32", shape=s) for n, s in shapes.items()}
    ours = to_ours(spec, [infos], url="theirs")
    found = {n: v.shape for (n, _), v in ours.tensors.items()}
    assert found["layers.0.experts.w13"] == (2, 12, 8)
    assert found["embed.weight"] == (32000, 8)
    assert ours.aliases == {"head.weight": "embed.weight"}
    infos = {n: TensorInfo(dtype=v.dtype, shape=v.shape) for n, v in ours.tensors.items()}
    (back,) = to_theirs(spec, infos, aliases=ours.aliases, url="ours")
    assert {n: v.shape for (n, _), v in back.tensors.items()} == {
        n: s for n, s in shapes.items() if "inv_freq" not in n
    }


@pytest.mark.parametrize("word", [*OPERATIONS, *KINDS])
def test_every_word_is_explained(word: str) -> None:
    assert f"| `{word}`" in TEXT
