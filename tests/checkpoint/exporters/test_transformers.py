"""What is exported for Hugging Face is what `transformers` loads: the same logits to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from elastic_train.checkpoint.exporters.hf import export_hf
from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.storage.fsspec_store import open_store

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.ring2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_model_is_loaded_from_several_files_and_is_the_same(
    tmp_path: Path, tied: bool, dtype: str | None
) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        architectures=["LlamaForCausalLM"],
    )
    model = transformers.LlamaForCausalLM(config).eval()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    source = open_checkpoint(str(tmp_path / "model.pt"))
    assert dict(source.aliases) == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    settings = json.loads(config.to_json_string(use_diff=False))
    out = tmp_path / "out"
    done = export_hf(source, open_store(str(out)), dtype=dtype, max_file_bytes=20_000, config=settings)
    assert len(done.files) > 3
    assert (out / "model.safetensors.index.json").is_file()
    kind = getattr(torch, dtype or "float32")
    loaded, problems = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=kind, output_loading_info=True
    )
    assert not any(problems.values()), problems
    model.to(kind).save_pretrained(tmp_path / "theirs")  # a model that is cast has other rotary frequencies
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=kind)
    tokens = torch.arange(10).reshape(1, 10)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, theirs(tokens).logits)
