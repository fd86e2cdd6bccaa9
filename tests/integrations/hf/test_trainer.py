"""`Trainer` on a cluster: what a script finds before, while and after it trains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="whose trainer is replaced")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
import ray
from ray.train import RunConfig, ScalingConfig
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers import Trainer as Theirs

import elastic_train as et
from elastic_train.cluster.driver.launch import prepare_local_environment
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.errors import ConfigError
from elastic_train.integrations.hf import Trainer
from elastic_train.testing.slow_samples import SlowSamples
from tests.integrations.hf.problems import arguments, causal, classifier, labelled, texts

pytestmark = [pytest.mark.ring3, pytest.mark.timeout(400), pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[LocalCluster]:
    prepare_local_environment()
    with LocalCluster(nodes=2) as made:
        yield made
    ray.shutdown()


class Hears(TrainerCallback):
    """The names of what it is told, with the step."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heard.append(("train_begin", state.global_step))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heard.append(("epoch_begin", state.global_step))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heard.append(("epoch_end", state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.heard.append(("log", state.global_step))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        self.heard.append(("evaluate", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heard.append(("save", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heard.append(("train_end", state.global_step))


def accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def test_a_trainer_is_after_training_what_transformers_own_is(tmp_path: Path) -> None:
    changes = {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_steps": 2, "num_train_epochs": 2}
    found: list[Any] = []
    for kind, name in ((Theirs, "theirs"), (Trainer, "ours")):
        hears = Hears()
        trainer = kind(
            model=classifier(),
            args=arguments(tmp_path / name, **changes),
            train_dataset=labelled(),
            eval_dataset=labelled(9),
            compute_metrics=accuracy,
            callbacks=[hears],
        )
        result = trainer.train()
        trainer.save_model()
        trainer.save_state()
        found.append((trainer, result, hears))
    (theirs, expected, told), (ours, result, heard) = found
    assert (result.global_step, result.training_loss) == (
        expected.global_step,
        pytest.approx(expected.training_loss, rel=1e-6),
    )
    assert result.metrics.keys() == expected.metrics.keys()
    for mine, wanted in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.allclose(mine, wanted, atol=1e-4)
    # A checkpoint is heard of once it is written, and may come after later steps.
    saves = [one for one in heard.heard if one[0] == "save"]
    assert saves == [one for one in told.heard if one[0] == "save"]
    assert [one for one in heard.heard if one[0] != "save"] == [one for one in told.heard if one[0] != "save"]
    mine, wanted = ours.evaluate(), theirs.evaluate()
    assert mine["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-5)
    assert mine["eval_accuracy"] == wanted["eval_accuracy"]
    logits = ours.predict(labelled(5)).predictions
    assert logits == pytest.approx(theirs.predict(labelled(5)).predictions, abs=1e-4)
    with pytest.raises(ConfigError, match="called before"):
        ours.train()


def test_a_run_that_ends_within_an_epoch_ends_that_epoch_as_transformers_does(tmp_path: Path) -> None:
    heard: list[list[tuple[str, int]]] = []
    for kind, name in ((Theirs, "theirs"), (Trainer, "ours")):
        hears = Hears()
        changes = {"eval_strategy": "epoch", "save_strategy": "epoch", "max_steps": 6}
        trainer = kind(
            model=classifier(),
            args=arguments(tmp_path / name, **changes),
            train_dataset=labelled(),
            eval_dataset=labelled(9),
            callbacks=[hears],
        )
        trainer.train()
        saved = sorted(path.name for path in (tmp_path / name).glob("checkpoint-*"))
        assert saved == ["checkpoint-4", "checkpoint-6"]
        heard.append(hears.heard)
    theirs, ours = ([one for one in told if one[0] != "save"] for told in heard)
    assert ours == theirs


def test_what_a_callback_raises_and_a_checkpoint_that_has_no_place_cost_no_other_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Raises(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                raise RuntimeError("a tracker that is away")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 8:
                (tmp_path / "checkpoint-4").unlink()
            control.should_save |= state.global_step == 3  # where none is due
            control.should_evaluate |= state.global_step in (3, 5)

    for step in (4, 8):
        (tmp_path / f"checkpoint-{step}").write_text("in its place")
    hears = Hears()
    trainer = Trainer(
        model=causal(),
        args=arguments(tmp_path, max_steps=8, save_strategy="steps", save_steps=4),
        train_dataset=SlowSamples(texts(), 0.02),
        callbacks=[hears, Raises()],
    )
    trainer.train()
    assert [step for what, step in hears.heard if what == "log"][:8] == [*range(1, 9)]
    assert [step for what, step in hears.heard if what == "save"] == [4]
    assert (tmp_path / "checkpoint-4" / "model.safetensors").exists()
    lost = [record.getMessage() for record in caplog.records if "was not written" in record.getMessage()]
    assert [text.split()[0] for text in lost] == ["checkpoint-8"]
    vain = [record.getMessage() for record in caplog.records if "in vain" in record.getMessage()]
    assert [text.split(", in vain")[0] for text in vain] == [
        "a callback set control.should_save at step 3",
        "a callback set control.should_evaluate at step 3",
    ]


def test_a_script_started_again_has_its_logs_and_goes_on_where_it_was(tmp_path: Path) -> None:
    """Its first run is ended by a callback."""

    class Ends(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= 3

    def trainer(*callbacks: Any, pause_s: float = 0.0) -> Trainer:
        return Trainer(
            model=causal(),
            args=arguments(tmp_path / "ours", max_steps=30, save_strategy="steps", save_steps=10),
            train_dataset=SlowSamples(texts(), pause_s),
            callbacks=list(callbacks),
            scaling_config=ScalingConfig(num_workers=(1, 2)),
            run_config=RunConfig(name="ended", storage_path=str(tmp_path / "runs")),
            limits=et.Limits(not_finite=3),
        )

    first = trainer(Ends(), pause_s=0.1)
    first.train()
    assert 3 <= first.state.global_step < 30
    second, hears = trainer(), Hears()
    second.add_callback(hears)
    second.train()
    theirs = Theirs(model=causal(), args=arguments(tmp_path / "theirs", max_steps=30), train_dataset=texts())
    theirs.train()
    logs = [{e["step"]: e["loss"] for e in t.state.log_history if "loss" in e} for t in (second, theirs)]
    assert logs[0] == pytest.approx(logs[1], rel=2e-6)
    assert min(step for what, step in hears.heard if what == "log") > first.state.global_step
    assert (tmp_path / "ours" / "checkpoint-30" / "model.safetensors").exists()


def test_patience_ends_a_run_at_the_step_of_transformers_with_the_best_model(tmp_path: Path) -> None:
    states = []
    for kind, name in ((Theirs, "theirs"), (Trainer, "ours")):
        trainer = kind(
            model=causal(),
            args=arguments(
                tmp_path / name,
                num_train_epochs=20,
                learning_rate=5e-2,
                eval_strategy="steps",
                eval_steps=4,
                save_strategy="steps",
                save_steps=4,
                load_best_model_at_end=True,
                metric_for_best_model="loss",
            ),
            train_dataset=texts(30)[:23],
            eval_dataset=texts(30)[23:],
            callbacks=[EarlyStoppingCallback(2)],
        )
        trainer.train()
        states.append(
            (trainer, json.loads((tmp_path / name / "checkpoint-4" / "trainer_state.json").read_text()))
        )
    (theirs, _), (ours, _) = states
    assert ours.state.global_step == theirs.state.global_step < 80
    assert ours.state.best_global_step == theirs.state.best_global_step
    assert Path(ours.state.best_model_checkpoint).name == Path(theirs.state.best_model_checkpoint).name
    for mine, wanted in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.allclose(mine, wanted, atol=1e-3)


def test_a_new_run_begins_with_a_checkpoint_of_transformers(tmp_path: Path) -> None:
    changes = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    theirs = Theirs(model=causal(), args=arguments(tmp_path / "theirs", **changes), train_dataset=texts())
    theirs.train()
    ours = Trainer(model=causal(), args=arguments(tmp_path / "ours", **changes), train_dataset=texts())
    result = ours.train(resume_from_checkpoint=str(tmp_path / "theirs" / "checkpoint-4"))
    assert result.global_step == 8
    losses = [{e["step"]: e["loss"] for e in t.state.log_history if "loss" in e} for t in (ours, theirs)]
    for step in range(5, 9):
        assert losses[1][step] == pytest.approx(losses[0][step], rel=2e-6)


def test_adapters_of_peft_are_trained_and_saved(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the adapters are its")
    trainers = []
    for kind, name in ((Theirs, "theirs"), (Trainer, "ours")):
        model = causal()
        torch.manual_seed(4)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        trainer = kind(model=adapted, args=arguments(tmp_path / name, max_steps=5), train_dataset=texts())
        trainer.train()
        trainer.save_model()
        trainers.append(trainer)
    logs = [{e["step"]: e["loss"] for e in t.state.log_history if "loss" in e} for t in trainers]
    assert logs[1] == pytest.approx(logs[0], rel=2e-6)
    opened = peft.PeftModel.from_pretrained(causal(), str(tmp_path / "ours"))
    wanted = trainers[1].model.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in opened.state_dict().items())
