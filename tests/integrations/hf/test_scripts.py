"""Scripts of transformers on a cluster, beside the same scripts with transformers' own Trainer."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="whose scripts these are")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
pytest.importorskip("datasets", reason="what the scripts read")
import ray
from transformers import AutoModelForCausalLM, AutoTokenizer

from elastic_train.cluster.driver.launch import prepare_local_environment
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.cluster.run_reading import records
from elastic_train.control.events import StepCommitted, WorkerReady
from elastic_train.observe.ledger import ledger
from elastic_train.storage.fsspec_store import open_store

pytestmark = [
    pytest.mark.ring4,
    pytest.mark.timeout(500),
    pytest.mark.filterwarnings("default"),  # what transformers warns of is its own
]
HERE = Path(__file__).parent
JOB = HERE.parents[2] / "jobs" / "hf_trainer.py"
OURS, THEIRS = "from elastic_train.integrations.hf import Trainer", "from transformers import Trainer"
COMMON = ["--report_to", "none", "--disable_tqdm", "True", "--use_cpu", "True", "--logging_steps", "1"]
UNLIKE = ("runtime", "per_second", "preparation_time", "total_flos")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    prepare_local_environment()
    with LocalCluster(nodes=3) as made:
        yield made
    ray.shutdown()


def run(script: Path, directory: Path, words: list[str], *, ours: bool) -> dict[str, Any]:
    """The trainer's state after a script ran as a program."""
    source = script.read_text()
    assert source.count(OURS) == 1
    program = directory.parent / f"{directory.name}_{script.name}"
    program.write_text(source if ours else source.replace(OURS, THEIRS))
    before = sys.argv
    sys.argv = [str(program), "--output_dir", str(directory), *COMMON, *words]
    try:
        runpy.run_path(str(program), run_name="__main__")
    finally:
        sys.argv = before
    return json.loads((directory / "trainer_state.json").read_text())


def check_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert len(ours["log_history"]) == len(theirs["log_history"])
    for mine, other in zip(ours["log_history"], theirs["log_history"], strict=True):
        for name, value in other.items():
            if not name.endswith(UNLIKE):
                assert mine[name] == pytest.approx(value, rel=2e-6, abs=2e-6), (name, mine["step"])


class Kills:
    """Kills a worker once a run has committed a step."""

    def __init__(self, run: Path, step: int) -> None:
        self._run, self._step, self.killed = run, step, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Kills:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self.killed and not self._over.wait(0.05):
            if not (self._run / "journal").exists():
                continue
            events = [record.event for record in records(open_store(str(self._run)))]
            workers = [event.pid for event in events if isinstance(event, WorkerReady)]
            if any(isinstance(e, StepCommitted) and e.step >= self._step for e in events) and workers:
                self.killed = workers[-1]
                os.kill(self.killed, signal.SIGKILL)


def test_the_job_keeps_the_losses_of_transformers_though_a_worker_is_killed(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    words = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "4", "--max_steps", "48"]
    words += [
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "16",
        "--save_steps",
        "16",
        "--learning_rate",
        "3e-3",
    ]
    words += ["--load_best_model_at_end", "True"]
    theirs = run(JOB, tmp_path / "theirs", words, ours=False)
    with Kills(tmp_path / "ours" / "elastic", 3) as kills:  # which may take the checkpoint under way with it
        ours = run(JOB, tmp_path / "ours", [*words, "--save_total_limit", "2"], ours=True)
    assert kills.killed
    made = tuple(records(open_store(str(tmp_path / "ours" / "elastic"))))
    assert len({entry.generation for entry in ledger(made).kept}) > 1
    check_equal(ours, theirs)
    assert ours["best_global_step"] == theirs["best_global_step"]
    for directory in (tmp_path / "ours", *sorted((tmp_path / "ours").glob("checkpoint-*"))):
        other = tmp_path / "theirs" / directory.relative_to(tmp_path / "ours")
        mine, wanted = (AutoModelForCausalLM.from_pretrained(d).state_dict() for d in (directory, other))
        assert all(torch.allclose(mine[name], wanted[name], atol=2e-4) for name in wanted), directory
        assert AutoTokenizer.from_pretrained(directory).pad_token == "<pad>"
    assert len(list((tmp_path / "ours").glob("checkpoint-*"))) == 2


SCRIPTS = {
    "run_clm": ["--do_train", "True", "--do_eval", "True", "--num_train_epochs", "2"],
    "run_glue": ["--num_train_epochs", "2", "--train_sampling_strategy", "group_by_length"],
    "run_mlm": ["--max_steps", "14", "--lr_scheduler_type", "cosine", "--warmup_steps", "0.2"],
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "run_clm" else pytest.mark.matrix) for name in SCRIPTS]
)
def test_a_script_of_transformers_changes_one_line(cluster: LocalCluster, tmp_path: Path, name: str) -> None:
    words = [*SCRIPTS[name], "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "3"]
    words += ["--eval_strategy", "epoch" if name != "run_mlm" else "steps", "--eval_steps", "5"]
    words += ["--save_strategy", "no", "--learning_rate", "2e-3"]
    script = HERE / "scripts" / f"{name}.py"
    theirs = run(script, tmp_path / "theirs", words, ours=False)
    ours = run(script, tmp_path / "ours", words, ours=True)
    check_equal(ours, theirs)
    for results in ("train_results.json", "eval_results.json"):
        assert (tmp_path / "ours" / results).exists()
