"""The conversion verbs of the command line, on another system's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from typer.testing import CliRunner

from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.cli.app import app
from elastic_train.cli.exit_codes import CHECKPOINT, FINISHED, USAGE, USER_ERROR
from elastic_train.errors import Fenced
from elastic_train.storage.commit_log import CommitLog
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.lease import Lease
from tests.cli.conftest import renewing

pytestmark = pytest.mark.ring1

SPEC = """
[[rule]]
select = "qkv"
to = ["q", "k", "v"]
operations = [{ op = "split", parts = 3 }]
"""


def run(*arguments: object, code: int = FINISHED) -> str:
    found = CliRunner().invoke(app, ["ckpt", *map(str, arguments)])
    assert found.exit_code == code, found.output
    return found.output


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    (tmp_path / "theirs").mkdir()
    save_file(
        {"qkv": np.arange(24, dtype=np.float32).reshape(6, 4)}, tmp_path / "theirs" / "model.safetensors"
    )
    return tmp_path / "theirs"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "spec.toml").write_text(SPEC)
    return tmp_path / "spec.toml"


def test_a_checkpoint_goes_in_and_comes_out_the_same(theirs: Path, spec: Path, tmp_path: Path) -> None:
    ours, out = tmp_path / "run", tmp_path / "out"
    assert "3 tensors" in run("import", theirs, ours, "--spec", spec)
    np.testing.assert_array_equal(open_checkpoint(str(ours))["k"]["param"], np.arange(8, 16).reshape(2, 4))
    assert "1 files" in run("export", ours, out, "--to", "hf", "--spec", spec)
    run("diff", theirs, out)
    run("diff", ours, out, "--spec", spec)
    assert "dtype" not in run("export", ours, tmp_path / "bf16", "--to", "hf", "--dtype", "bf16")
    assert "float32 [2, 4] in A, bfloat16 [2, 4] in B" in run(
        "diff", ours, tmp_path / "bf16", code=USER_ERROR
    )


def test_the_map_is_printed_and_nothing_is_written(theirs: Path, spec: Path, tmp_path: Path) -> None:
    text = run("import", theirs, tmp_path / "run", "--spec", spec, "--describe")
    assert "k (param): float32 [2, 4], by spec.toml, rule 1 = qkv (param)[2:4,0:4]" in text
    assert not (tmp_path / "run").exists()


def test_reads_are_planned_before_they_are_done(theirs: Path, tmp_path: Path) -> None:
    run("import", theirs, tmp_path / "run", "--copy")
    plan = json.loads(run("plan", tmp_path / "run", "--to", "dp_shard=2,dp_replicate=3", "--json"))
    assert [rank["state_bytes"] for rank in plan["ranks"]] == [48, 48]
    assert plan["amplification"] == 2.0  # both halves are on one page, which each rank reads
    text = run("plan", tmp_path / "run", "--to", "tp=2", code=USAGE)
    assert "tp cut a model in a way that its job knows" in text


def test_garbage_is_named_and_then_removed(theirs: Path, tmp_path: Path) -> None:
    run("import", theirs, tmp_path / "run", "--copy")
    left = tmp_path / "run" / "checkpoints" / "step-0000000000.g9"
    left.mkdir()
    (left / "w00000.safetensors").write_bytes(bytes(100))
    assert "would remove checkpoints/step-0000000000.g9: 100" in run("gc", tmp_path / "run", "--dry-run")
    assert left.exists()
    assert "removed checkpoints/step-0000000000.g9" in run("gc", tmp_path / "run")
    assert not left.exists()
    assert "0 directories" in run("gc", tmp_path / "run", "--dry-run")
    run("verify", tmp_path / "run")


def test_a_lease_taken_to_remove_garbage_is_released_where_the_term_cannot_begin(
    theirs: Path, tmp_path: Path
) -> None:
    run("import", theirs, tmp_path / "run", "--copy")
    for record in (tmp_path / "run" / "commits").iterdir():
        record.unlink()
    assert "the commit log is gone" in run("gc", tmp_path / "run", code=CHECKPOINT)
    lease = Lease(open_store(str(tmp_path / "run")), holder="another", lease_s=60.0).look()
    assert lease is not None
    assert lease.released


def test_wrong_usage_and_missing_checkpoints_are_said(theirs: Path, tmp_path: Path) -> None:
    run("export", theirs, tmp_path / "out", "--to", "onnx", code=USAGE)
    run("export", theirs, tmp_path / "out", "--to", "dcp", "--dtype", "bf16", code=USAGE)
    run("import", theirs, tmp_path / "run", "--spec", tmp_path / "no.toml", code=USAGE)
    (tmp_path / "empty").mkdir()
    run("import", tmp_path / "empty", tmp_path / "run", code=CHECKPOINT)


def test_other_systems_checkpoints_are_shown_and_verified_where_they_lie(
    theirs: Path, tmp_path: Path
) -> None:
    text = run("show", theirs)
    assert "by Hugging Face" in text
    assert "qkv" in text
    assert "no problems" in run("verify", theirs)
    run("import", theirs, tmp_path / "run", "--copy")
    shown = json.loads(run("show", tmp_path / "run", "--json"))
    assert [t["tensor"] for t in shown["tensors"]] == ["qkv"]
    (data,) = (tmp_path / "run").rglob("w00000.safetensors")
    data.write_bytes(data.read_bytes()[:-1])
    assert "too early" in run("verify", tmp_path / "run", code=CHECKPOINT)


def test_settings_are_compared_by_parameter_and_not_by_the_order_of_groups(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.pt", "b.pt", "c.pt")]
    for path, order, rate in zip(paths, ("uv", "vu", "uv"), (0.1, 0.1, 0.2), strict=True):
        model = {name: torch.ones(2) for name in "uv"}
        groups = [{"params": [n], "lr": rate if n == "u" else 0.5} for n in order]
        state = {n: {"exp_avg": torch.zeros(2)} for n in "uv"}
        torch.save({"model": model, "optimizer": {"state": state, "param_groups": groups}}, path)
    assert "no differences" in run("diff", paths[0], paths[1])
    text = run("diff", paths[0], paths[2], code=USER_ERROR)
    assert "optimizer.groups.u.lr: 0.1 in A, 0.2 in B" in text


def test_garbage_of_a_run_that_is_held_is_left_alone(theirs: Path, tmp_path: Path) -> None:
    run("import", theirs, tmp_path / "run", "--copy")
    left = tmp_path / "run" / "checkpoints" / "step-0000000001.g1"
    left.mkdir()
    (left / "w00000.safetensors").write_bytes(bytes(100))
    store = open_store(str(tmp_path / "run"))
    lease = Lease(store, holder="a controller", lease_s=0.2)
    lease.acquire()
    lease.renew(CommitLog(store).begin_term("a controller"))
    assert "held by a controller" in run("gc", tmp_path / "run", code=USAGE)
    with renewing(lease, 2):
        assert "is already active" in run("gc", tmp_path / "run", "--wait", code=USAGE)
    assert left.exists()
    lease.renew(2)
    assert "removed checkpoints/step-0000000001.g1" in run("gc", tmp_path / "run", "--wait")
    with pytest.raises(Fenced):
        lease.renew(2)
