"""`elastic-train plan`: candidates for a job, read off a meta build; nothing is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from elastic_train.cli.app import app
from elastic_train.cli.exit_codes import CHECKPOINT, FINISHED, USAGE
from elastic_train.config import Batch, RunSpec
from elastic_train.control.events import GroupReady, StepCommitted
from elastic_train.observe.journal_records import FormedGroup, Record, to_json, wall_text
from elastic_train.planner.plan import Mesh
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.journal import Journal
from elastic_train.train.model.build import draw, tensors
from elastic_train.train.profile import profiled_shape
from jobs.pretrain_lm import trainer as pretrain

pytestmark = pytest.mark.ring2

JOB = str(Path(__file__).parents[2] / "jobs" / "pretrain_lm.py")


def plan(*arguments: str):
    return CliRunner().invoke(app, ["plan", JOB, *arguments])


def test_the_table_names_the_winner_first_and_why_the_others_lost():
    shown = plan("--nodes", "2x2,1x1", "--size", "nano")
    assert shown.exit_code == 0, shown.output
    header, first, second, *_ = shown.output.splitlines()
    assert header.split()[:3] == ["mesh", "ranks", "idle"]
    assert first.endswith("chosen")
    assert "less goodput" in second
    assert "of 5 workers" in shown.output


def test_json_holds_the_bytes_to_move_from_the_nodes_before():
    shown = plan("--nodes", "2x2", "--before", "1x2", "--size", "nano", "--tflops", "0.0001", "--json")
    rows = json.loads(shown.output)["rows"]
    assert rows[0]["why_not"] == ""
    assert rows[0]["moved"] > 0
    assert {"memory", "step_s", "bubble", "stages"} <= rows[0].keys()


def test_a_pipelines_log_and_what_logging_less_would_cost_are_told(tmp_path: Path):
    job = tmp_path / "staged.py"
    job.write_text(
        "from dataclasses import replace\n"
        "import elastic_train as et\n"
        "from jobs.pretrain_lm import trainer as pretrain\n"
        "def trainer(*, size: str = 'nano') -> et.ElasticTrainer:\n"
        "    made = pretrain(size=size)\n"
        "    checkpoints = et.Checkpoints(every=10)\n"
        "    made.spec = replace(made.spec, parallelism=et.Parallelism(pp=2), checkpoints=checkpoints)\n"
        "    return made\n"
    )
    shown = CliRunner().invoke(app, ["plan", str(job), "--nodes", "2x1"])
    assert shown.exit_code == 0, shown.output
    logs = [line for line in shown.output.splitlines() if "log of" in line]
    # Six micro-batches of 2 x 64 x 32 float32, there and back, for ten steps.
    assert "the boundary before stage 1: up to 1.9 MiB in 10 steps" in logs[0]
    assert [line.endswith("(chosen)") for line in logs] == [True, False], "without a budget all is logged"
    assert "log of nothing: up to 0.0 B" in logs[1]
    shown = CliRunner().invoke(app, ["plan", str(job), "--nodes", "2x1", "--json"])
    assert len(json.loads(shown.output)["logs"]) == 2


def test_what_cannot_be_planned_ends_with_its_own_code():
    nothing = plan("--nodes", "1x1", "--size", "nano", "--memory", "0.00001")
    assert nothing.exit_code == 4
    assert "parameters need" in nothing.output
    assert plan("--nodes", "two").exit_code == 2


def test_a_known_accelerator_says_what_is_not_given():
    def best(*words: str) -> dict[str, float]:
        shown = plan("--nodes", "2x8", "--size", "base", "--json", *words)
        assert shown.exit_code == 0, shown.output
        return json.loads(shown.output)["rows"][0]

    gpu, slower = best("--hardware", "h100"), best("--hardware", "h100", "--tflops", "1")
    assert gpu["step_s"] < slower["step_s"] < best()["step_s"]
    unknown = plan("--nodes", "2x8", "--hardware", "h1000")
    assert unknown.exit_code == 2
    assert "h200" in unknown.output


def test_layers_are_what_a_forward_on_the_meta_device_shows():
    from elastic_train.cli.job_file import load_job

    task = load_job(JOB)(size="nano", seq_len=16, micro_size=2, global_size=4).task
    spec = RunSpec(
        name="r",
        storage_path="s",
        batch=Batch(global_size=4, micro_size=2),
        max_steps=1,
        min_workers=1,
        max_workers=1,
    )
    shape = profiled_shape(task, spec, flops_per_s=1.0)
    before, first, second, after = shape.layers
    tokens, dim, hidden, narrow = 2 * 17, 32, 96, 16  # a window and the token after it
    matrices = 2 * dim * dim + 2 * dim * narrow + 3 * dim * hidden
    assert before.seconds == 0.0
    assert first.seconds == second.seconds
    attention = first.seconds - 3 * 2 * tokens * matrices
    assert attention == 3 * 4 * tokens * 17 * dim
    assert after.seconds == 3 * 2 * tokens * dim * 264
    assert shape.boundary_bytes == tokens * dim * 4
    assert (before.block, first.block, after.block) == (False, True, False)
    by_layer = [sum(t.numel for t in shape.tensors if t.layer == i and t.trainable) for i in range(4)]
    assert by_layer == [264 * dim, matrices + 2 * dim, matrices + 2 * dim, 264 * dim + dim]
    assert first.activation_bytes > 0


def test_what_a_plan_would_read_of_a_checkpoint_is_told_by_the_job(tmp_path: Path):
    task = pretrain(size="nano").task
    model = tensors(draw(task, "fp32").parameters)
    saved = {name: torch.zeros(tensor.shape) for name, tensor in model.items()}
    save_file(saved, tmp_path / "model.safetensors")

    def ckpt_plan(*words: str, code: int = FINISHED) -> str:
        shown = CliRunner().invoke(app, ["ckpt", "plan", str(tmp_path), *words])
        assert shown.exit_code == code, shown.output
        return shown.output

    found = json.loads(ckpt_plan("--to", "pp=2,tp=2", "--job", JOB, "--json", "--size", "nano"))
    total = sum(tensor.numel() * 4 for tensor in saved.values())
    assert len(found["ranks"]) == 4
    # Rows of what tp cuts along dim 1 are so short here that those of the other rank are read along.
    assert total <= sum(rank["read_bytes"] for rank in found["ranks"]) < 1.5 * total
    assert max(rank["state_bytes"] for rank in found["ranks"]) < total / 2
    text = ckpt_plan("--to", "tp=2", "--job", JOB, "--size", "tiny", code=CHECKPOINT)
    assert "is not in the checkpoint (did you mean layers.1." in text
    assert "no option --size" in ckpt_plan("--to", "dp_shard=2", "--size", "nano", code=USAGE)


def test_what_a_run_measured_stands_beside_what_is_predicted(tmp_path: Path):
    formed = FormedGroup(
        generation=1,
        step=0,
        source="fresh",
        mesh=str(Mesh(dp_replicate=5)),
        dp=5,
        workers=tuple(f"w{i}" for i in range(5)),
        nodes=("n0",) * 5,
        step_s=0.5,
    )
    journal = Journal(open_store(str(tmp_path)), 1)
    ready = GroupReady(at=0.0, generation=1, step=0, seconds=1.0)
    journal.append(
        to_json(Record(seq=0, wall=wall_text(0.0), event=ready, reason="", phase="running", formed=formed))
    )
    for step, seconds in enumerate((9.0, 1.0, 2.0), start=1):
        event = StepCommitted(
            at=0.0,
            generation=1,
            step=step,
            loss=1.0,
            tokens=4.0,
            grad_norm=1.0,
            skipped=False,
            seconds=seconds,
            vote=(),
        )
        journal.append(
            to_json(Record(seq=step, wall=wall_text(step), event=event, reason="", phase="running"))
        )
    journal.flush()
    asked = ("--nodes", "2x2,1x1", "--size", "nano", "--run", str(tmp_path))
    header, *rows = plan(*asked).output.splitlines()
    assert header.split()[7:9] == ["step", "measured"]
    (row,) = (row for row in rows if row.startswith(f"{Mesh(dp_replicate=5)} "))
    assert "1.5 s" in row, "the mean of all but the first"
    measured = json.loads(plan(*asked, "--json").output)["measured"]
    assert list(measured.values()) == [{"steps": 2, "mean_s": 1.5, "expected_s": 0.5}]
