"""A trainer that is told of a run has the state, the logs and the events that transformers' own loop would give it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import EarlyStoppingCallback, ProgressCallback, TrainerCallback, default_data_collator
from transformers.trainer_pt_utils import LabelSmoother

from oobleck.control import journal
from oobleck.control.journal import CheckpointSaved, Evaluated, JournalEntry, PlanAdopted, StepDone
from oobleck.control.protocol import CommitRecord
from oobleck.errors import ConfigError, CorruptCheckpoint
from oobleck.training.checkpoint.conversion import import_model
from oobleck.training.checkpoint.trainer_checkpoint import write_checkpoint
from oobleck.training.model import LiveModel, ModelStructure
from tests.control.journals import run_with_a_loss

from .trainers import LENGTH, gather, model, rows, trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore:'pin_memory':UserWarning"
)


class Recorder(TrainerCallback):
    """Notes all events, and what the state is in them."""

    LEFT_OUT = ("on_init_end", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_prediction_step")

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_") or name in Recorder.LEFT_OUT:
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **details: Any) -> None:
            self.heard.append((name, state.global_step, state.epoch and round(state.epoch, 6)))

        return note


def step(number: int, loss: float) -> StepDone:
    record = CommitRecord(
        step=number, generation=1, loss=loss, grad_norm=2.0, learning_rate=0.1, num_samples=4, samples_repeated=0,
        samples_missing=0, duration_s=0.1,
    )  # fmt: skip
    return StepDone(t_s=float(number), record=record, tokens=64)


class Heard(logging.Handler):
    """Keeps what transformers' Trainer logs of the beginning."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line.startswith(("*****", "  ")):
            self.lines.append(line)

    def take(self) -> list[str]:
        taken, self.lines = self.lines, []
        return taken


@pytest.fixture
def announced() -> Iterator[Callable[[], list[str]]]:
    """Returns what has been logged since the last time."""
    logger, handler = logging.getLogger("transformers.trainer"), Heard()
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler.take
    logger.removeHandler(handler)
    logger.setLevel(before)


def told(made: Any, *entries: JournalEntry) -> Any:
    follower = made.follow(made.job())
    begun = next(entry for entry in run_with_a_loss() if isinstance(entry, PlanAdopted))
    for entry in (begun, *entries):
        follower.take(entry)
    return follower


def checkpoint(directory: Path, trained: torch.nn.Module) -> Path:
    """A directory with a checkpoint of ours that has these weights."""
    directory.mkdir(exist_ok=True)
    trained.save_pretrained(directory / "model")  # type: ignore[operator]  # of transformers
    import_model(directory / "model", directory / "checkpoints")
    return directory / "checkpoints"


def checkpoint_of_live(directory: Path, trained: torch.nn.Module) -> Path:
    """The same for a model as a script has made it."""
    structure = ModelStructure.from_live(LiveModel.skeleton_of(trained), sequence_length=LENGTH)
    write_checkpoint(directory / "live", structure, trained.state_dict(), {}, step=1)
    return directory / "live"


@pytest.mark.parametrize(
    "values",
    [
        {"logging_steps": 2, "num_train_epochs": 2},
        {"logging_strategy": "epoch", "max_steps": 4},
        {"logging_steps": 5, "logging_first_step": True, "num_train_epochs": 2, "gradient_accumulation_steps": 2},
    ],
)
def test_events_and_logs_are_those_of_transformers(
    tmp_path: Path, values: dict[str, Any], announced: Callable[[], list[str]]
):
    theirs, ours = Recorder(), Recorder()
    given = {"per_device_train_batch_size": 4, "save_strategy": "no", **values}
    real = trainer(tmp_path, kind=transformers.Trainer, callbacks=[theirs], **given)
    real.train()
    begun = announced()
    losses = [5.5 - 0.1 * number for number in range(real.state.global_step)]
    made = trainer(tmp_path, callbacks=[ours], **given)
    follower = told(made, *(step(number, loss) for number, loss in enumerate(losses, 1)))
    assert announced() == begun
    output = follower.finish(checkpoint(tmp_path, model()))
    assert ours.heard == theirs.heard
    assert output.global_step == real.state.global_step
    assert output.training_loss == pytest.approx(sum(losses) / len(losses))
    assert [entry.keys() for entry in made.state.log_history][:-1] == [
        entry.keys() for entry in real.state.log_history
    ][:-1]
    logged = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert sum(logged) / len(logged) == pytest.approx(sum(losses[: _logged(made)]) / _logged(made), abs=0.2)


def _logged(made: Any) -> int:
    """How many steps the logs are of."""
    return int([entry["step"] for entry in made.state.log_history if "loss" in entry][-1])


def saved(number: int) -> CheckpointSaved:
    return CheckpointSaved(
        t_s=1.0, name=f"step-{number}", step=number, saved_at="", size_bytes=1, pause_s=0.0, duration_s=0.1
    )


def test_a_checkpoint_is_told_once_with_the_state_of_its_step(tmp_path: Path):
    noted = Recorder()
    made = trainer(tmp_path, callbacks=[noted], per_device_train_batch_size=4, num_train_epochs=2, save_steps=2)
    told(made, step(1, 5.0), step(2, 5.0), step(3, 5.0), saved(2), step(4, 5.0), saved(4), saved(4))
    assert [event for event in noted.heard if event[0] == "on_save"] == [
        ("on_save", 2, pytest.approx(2 / 3)),
        ("on_save", 4, pytest.approx(4 / 3)),
    ]
    assert (made.state.global_step, made.state.epoch) == (4, pytest.approx(4 / 3))


def test_checkpoints_that_a_script_does_not_ask_for_are_not_told(tmp_path: Path):
    noted = Recorder()
    told(trainer(tmp_path, callbacks=[noted], save_strategy="no"), step(1, 5.0), saved(1))
    assert "on_save" not in {event for event, *_ in noted.heard}


def test_a_finished_script_that_runs_again_has_its_step_and_its_logs(tmp_path: Path):
    values = {"logging_steps": 1, "num_train_epochs": 2, "per_device_train_batch_size": 4}
    first = trainer(tmp_path, **values)
    checkpoints = checkpoint(tmp_path, model())
    told(first, step(1, 5.5), step(2, 5.25)).finish(checkpoints)
    noted = Recorder()
    again = trainer(tmp_path, callbacks=[noted, ProgressCallback()], **values)
    # A run that finds all steps done tells of no plan.
    output = again.follow(again.job()).finish(checkpoints)
    assert [event for event, *_ in noted.heard if event.startswith("on_train")] == ["on_train_begin", "on_train_end"]
    assert output.global_step == again.state.global_step == 2
    assert again.state.epoch == first.state.epoch
    logged = [entry["loss"] for entry in again.state.log_history if "loss" in entry]
    assert logged == [5.5, 5.25]
    elsewhere = checkpoint(tmp_path / "other", model())
    (next((elsewhere).glob("step-*")) / "trainer.json").write_text("torn {")
    torn = trainer(tmp_path, **values)
    told(torn).finish(elsewhere)
    assert [entry for entry in torn.state.log_history if "loss" in entry] == []


def test_the_trained_weights_are_in_the_model_that_the_script_has(tmp_path: Path):
    made = trainer(tmp_path)
    kept, trained = made.model, model()
    with torch.no_grad():
        trained.lm_head.weight.add_(1.0)
    told(made, step(1, 5.0)).finish(checkpoint(tmp_path, trained))
    assert made.model is kept
    for name, parameter in trained.named_parameters():
        assert torch.equal(made.model.get_parameter(name), parameter), name


def test_buffers_are_in_it_and_heads_are_tied_as_they_were(tmp_path: Path):
    made, trained = trainer(tmp_path), model()
    for each, value in ((made.model, 1.0), (trained, 7.0)):
        each.lm_head.weight = torch.nn.Parameter(each.lm_head.weight.detach().clone())
        each.transformer.h[1].mlp.register_buffer("seen", torch.tensor([value]))
    with torch.no_grad():
        trained.lm_head.weight.add_(1.0)
    seen = made.model.transformer.h[1].mlp.seen
    told(made, step(1, 5.0)).finish(checkpoint_of_live(tmp_path, trained))
    assert torch.equal(made.model.lm_head.weight, trained.lm_head.weight)
    assert made.model.lm_head.weight is not made.model.transformer.wte.weight
    assert seen.tolist() == [7.0]
    with pytest.raises(CorruptCheckpoint, match=r"not the model's: \['transformer\.h\.1\.mlp\.seen'\]"):
        told(trainer(tmp_path), step(1, 5.0)).finish(checkpoint_of_live(tmp_path, trained))


def test_weights_of_another_model_are_refused(tmp_path: Path):
    made = trainer(tmp_path)
    other = model()
    other.config.n_layer = 1
    other = type(other)(other.config)
    with pytest.raises(CorruptCheckpoint, match="are not the model's"):
        told(made).finish(checkpoint(tmp_path, other))
    with pytest.raises(CorruptCheckpoint, match="there is no checkpoint"):
        told(trainer(tmp_path)).finish(tmp_path / "nothing")


def test_a_run_that_is_stopped_before_it_has_anything_ends_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    entries: list[JournalEntry] = [journal.JobEnded(t_s=1.0, exit_code=0, reason="stopped on request")]
    ready = journal.ProfileKnown(t_s=0.5, profile_json="{}")
    for told_of in (entries, [ready, *entries]):
        made = trainer(tmp_path)
        follower = made.follow(made.job())
        for entry in told_of:
            follower.take(entry)
        # Once nodes have looked, they may have found that an earlier run has done all steps.
        with pytest.raises(CorruptCheckpoint) if ready in told_of else pytest.raises(SystemExit, match="0"):
            follower.finish(tmp_path / "nothing")
    assert capsys.readouterr().err.count("the run was stopped before its first step") == 1


def test_a_callback_that_compares_evaluations_stops_training(tmp_path: Path):
    made = trainer(
        tmp_path, callbacks=[EarlyStoppingCallback(2)], eval_dataset=rows(3), eval_strategy="steps", eval_steps=1,
        metric_for_best_model="eval_loss", greater_is_better=False, num_train_epochs=9,
    )  # fmt: skip
    follower = told(made)
    for number, loss in enumerate([5.0, 4.0, 4.5, 4.2], 1):
        assert not follower.wants_stop
        follower.take(step(number, 5.0))
        follower.take(Evaluated(t_s=1.0, step=number, loss=loss, num_samples=3, duration_s=0.1))
    assert follower.wants_stop
    assert made.state.best_metric == 4.0
    assert [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry] == [5.0, 4.0, 4.5, 4.2]


def test_an_evaluation_is_told_before_the_checkpoint_of_its_step(tmp_path: Path):
    noted, values = Recorder(), {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "eval_dataset": rows(3)}
    made = trainer(
        tmp_path, callbacks=[noted], per_device_train_batch_size=4, eval_delay=3, num_train_epochs=2, **values
    )
    entries: list[JournalEntry] = []
    for number in range(1, 5):
        known = Evaluated(t_s=1.0, step=number, loss=4.0, num_samples=3, duration_s=0.1)
        entries += [step(number, 5.0), saved(number), *([] if number == 2 else [known])]
    told(made, *entries)
    heard = [event[:2] for event in noted.heard if event[0] in ("on_save", "on_evaluate")]
    late = [(event, number) for number in (3, 4) for event in ("on_evaluate", "on_save")]
    assert heard == [("on_save", 1), ("on_save", 2), *late]


def evaluated(number: int) -> Evaluated:
    return Evaluated(t_s=1.0, step=number, loss=4.0, num_samples=3, duration_s=0.1)


@pytest.mark.parametrize("given", [{"max_steps": 6, "logging_steps": 1}, {"max_steps": 5, "logging_strategy": "epoch"}])
@pytest.mark.parametrize("saves", ["no", "steps", "epoch"])
@pytest.mark.parametrize("evaluates", ["no", "steps", "epoch"])
def test_an_epoch_ends_after_what_its_last_step_asks_for(
    evaluates: str, saves: str, given: dict[str, Any], tmp_path: Path
):
    values = {
        "per_device_train_batch_size": 4, "eval_steps": 3, "save_steps": 3, "eval_strategy": evaluates,
        "save_strategy": saves, "eval_dataset": rows(3) if evaluates != "no" else None, **given,
    }  # fmt: skip
    theirs, last = Recorder(), given["max_steps"]
    trainer(tmp_path, kind=transformers.Trainer, callbacks=[theirs], **values).train()
    for is_late in (False, True):
        ours, entries = Recorder(), list[JournalEntry]()
        for number in range(1, last + 1):
            due = [saved(number), evaluated(number)] if number in (3, last) else []
            due = due if evaluates != "no" else due[:1]
            entries += [step(number, 5.0), *(reversed(due) if is_late else due)]
        told(trainer(tmp_path, callbacks=[ours], **values), *entries).finish(
            checkpoint(tmp_path / str(is_late), model())
        )
        # Of a checkpoint that is on the disk after what follows it in transformers, callbacks hear then.
        late = {("on_save", 3)} if saves == "steps" and (is_late or evaluates != "steps") else set()
        late |= {("on_save", last)} if saves == "steps" and is_late and evaluates == "epoch" else set()
        heard = [[each for each in of.heard if each[:2] not in late] for of in (ours, theirs)]
        assert heard[0] == heard[1]
        assert sorted(ours.heard) == sorted(theirs.heard)


@pytest.mark.parametrize("at", [2, 3])
def test_a_run_that_continues_tells_of_the_epoch_that_it_goes_on_with(at: int, tmp_path: Path):
    given = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "save_steps": at}
    theirs, ours = Recorder(), Recorder()
    trainer(tmp_path, kind=transformers.Trainer, **given).train()
    real = trainer(tmp_path, kind=transformers.Trainer, callbacks=[theirs], **given)
    real.train(resume_from_checkpoint=str(tmp_path / "out" / f"checkpoint-{at}"))
    made = trainer(tmp_path, callbacks=[ours], **given)
    follower = made.follow(made.job())
    begun = next(entry for entry in run_with_a_loss() if isinstance(entry, PlanAdopted))
    follower.take(dataclasses.replace(begun, restored=f"step-{at}", restored_step=at, boundary=at))
    for number in range(at + 1, 7):
        follower.take(step(number, 5.0))
    follower.finish(checkpoint(tmp_path, model()))
    told_of = [[each for each in heard if each[0] != "on_save"] for heard in (ours.heard, theirs.heard)]
    assert told_of[0] == told_of[1]


@pytest.mark.parametrize("back_to", [1, 2, 4, 5])
def test_a_run_that_goes_back_tells_of_no_epochs_beginning_twice(back_to: int, tmp_path: Path):
    noted = Recorder()
    made = trainer(tmp_path, callbacks=[noted], per_device_train_batch_size=4, num_train_epochs=2)
    follower = told(made, *(step(number, 5.0) for number in range(1, 6)))
    begun = next(entry for entry in run_with_a_loss() if isinstance(entry, PlanAdopted))
    follower.take(dataclasses.replace(begun, restored=f"step-{back_to}", restored_step=back_to, boundary=back_to))
    for number in range(back_to + 1, 7):
        follower.take(step(number, 5.0))
    assert [event for event in noted.heard if event[0] == "on_epoch_begin"] == [
        ("on_epoch_begin", 0, 0),
        ("on_epoch_begin", 3, 1.0),
    ]


def test_an_epoch_whose_last_step_is_run_again_before_its_evaluation_ends_once(tmp_path: Path):
    noted, values = Recorder(), {"eval_strategy": "steps", "eval_steps": 3, "eval_dataset": rows(3)}
    made = trainer(tmp_path, callbacks=[noted], per_device_train_batch_size=4, num_train_epochs=2, **values)
    told(made, *(step(number, 5.0) for number in (1, 2, 3, 3)), evaluated(3), step(4, 5.0))
    ends = [event[:2] for event in noted.heard if event[0] in ("on_evaluate", "on_epoch_end")]
    assert ends == [("on_evaluate", 3), ("on_epoch_end", 3)]


def test_a_stop_at_the_end_of_an_epoch_is_known_before_workers_may_go_on(tmp_path: Path):
    values = {"eval_strategy": "steps", "eval_steps": 3, "eval_dataset": rows(3), "num_train_epochs": 2}
    asking = Asking("on_epoch_end", "should_training_stop", 3)
    follower = told(trainer(tmp_path, callbacks=[asking], per_device_train_batch_size=4, **values))
    for number in (1, 2, 3):
        follower.take(step(number, 5.0))
        assert not follower.wants_stop
        allowed = follower.take_allowed()
    assert allowed is None
    follower.take(evaluated(3))
    assert follower.wants_stop


@pytest.mark.parametrize("strategy", ["steps", "best"])
def test_the_best_weights_are_loaded_at_the_end(tmp_path: Path, strategy: str):
    values = {
        "eval_dataset": rows(3), "eval_strategy": "steps", "eval_steps": 1, "save_strategy": strategy, "save_steps": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "num_train_epochs": 9,
    }  # fmt: skip
    made = trainer(tmp_path, **values)
    follower, checkpoints = made.follow(made.job()), tmp_path / "checkpoints"
    follower.saves_in(checkpoints)
    follower.take(next(entry for entry in run_with_a_loss() if isinstance(entry, PlanAdopted)))
    for number, loss in enumerate([5.0, 4.0, 4.5], 1):
        trained = model()
        with torch.no_grad():
            trained.lm_head.weight.fill_(float(number))
        gather(checkpoints, trained, number)
        follower.take(step(number, 5.0))
        follower.take(Evaluated(t_s=1.0, step=number, loss=loss, num_samples=3, duration_s=0.1))
    follower.finish(checkpoint(tmp_path, trained))
    again = trainer(tmp_path, **values)  # of the same command, which finds all steps done
    follower = again.follow(again.job())
    follower.saves_in(checkpoints)
    follower.finish(checkpoints)
    for each in (made, again):
        assert each.state.best_global_step == 2
        assert float(each.model.lm_head.weight.detach().mean()) == 2.0


def test_a_callback_that_fails_is_reported_and_training_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    class Failing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            raise ValueError("is ill")

    made = trainer(tmp_path, callbacks=[Failing()])
    told(made, step(1, 5.0), step(2, 5.0))
    assert capsys.readouterr().err.count("ValueError: is ill") == 2
    assert made.state.global_step == 2


def test_a_callback_that_fails_loses_no_log(tmp_path: Path):
    class Failing(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            raise ValueError("is ill")

    made = trainer(tmp_path, callbacks=[Failing()], logging_steps=1)
    told(made, step(1, 5.0), step(2, 4.0))
    assert [entry["loss"] for entry in made.state.log_history] == [5.0, 4.0]


@pytest.mark.parametrize("what", ["optimizer", "lr_scheduler"])
def test_a_callback_that_uses_what_workers_alone_have_ends_the_run_by_name(tmp_path: Path, what: str):
    class Warming(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            details[what].param_groups[0]["lr"] = 0.0

    made = trainer(tmp_path, callbacks=[Warming()], num_train_epochs=9)
    follower = told(made, step(1, 5.0))
    assert follower.wants_stop
    with pytest.raises(ConfigError, match=r"Warming\.on_step_begin uses the .*, which workers alone have"):
        follower.finish(tmp_path)


def test_steps_after_a_callbacks_stop_are_counted_out_loud(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    class Stopping(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            control.should_training_stop = state.global_step >= 2

    made = trainer(tmp_path, callbacks=[Stopping()], num_train_epochs=9)
    follower = told(made, step(1, 5.0))
    for number in (2, 3, 4):
        follower.take(step(number, 5.0))
        assert follower.wants_stop
    follower.finish(checkpoint(tmp_path, model()))
    assert "a callback asked to stop after step 2, and the run stopped after step 4" in capsys.readouterr().err


class Asking(TrainerCallback):
    """Sets a field of the control in an event of one step."""

    def __init__(self, event: str, name: str, step: int, value: bool = True) -> None:
        def ask(args: Any, state: Any, control: Any, **details: Any) -> None:
            if state.global_step == step:
                setattr(control, name, value)

        setattr(self, event, ask)


@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end", "on_log", "on_evaluate", "on_save"])
def test_a_callback_that_ends_an_epoch_early_ends_the_run_by_name(event: str, tmp_path: Path):
    at = 0 if event == "on_step_begin" else 1
    made = trainer(
        tmp_path, callbacks=[Asking(event, "should_epoch_stop", at)], per_device_train_batch_size=4,
        num_train_epochs=3, logging_steps=1, save_steps=1,
    )  # fmt: skip
    follower = told(made, step(1, 5.0), saved(1), Evaluated(t_s=1.0, step=1, loss=5.0, num_samples=3, duration_s=0.1))
    assert follower.wants_stop
    with pytest.raises(ConfigError, match=f"a callback's {event} sets control.should_epoch_stop by step 1"):
        follower.finish(tmp_path)


@pytest.mark.parametrize(("event", "at"), [("on_train_begin", 0), ("on_epoch_end", 3), ("on_step_end", 3)])
def test_the_end_of_an_epoch_that_ends_anyway_is_a_callbacks_to_ask_for(event: str, at: int, tmp_path: Path):
    theirs, ours, given = Recorder(), Recorder(), {"per_device_train_batch_size": 4, "num_train_epochs": 2}
    asking = Asking(event, "should_epoch_stop", at)
    real = trainer(tmp_path, kind=transformers.Trainer, callbacks=[asking, theirs], save_strategy="no", **given)
    real.train()
    made = trainer(tmp_path, callbacks=[asking, ours], save_strategy="no", **given)
    told(made, *(step(number, 5.0) for number in range(1, 7))).finish(checkpoint(tmp_path, model()))
    assert ours.heard == theirs.heard


def test_a_callback_that_lengthens_training_ends_the_run_by_name(tmp_path: Path):
    class Longer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            state.max_steps = 9
            control.should_training_stop = False

    given = {"callbacks": [Longer()], "per_device_train_batch_size": 4, "save_strategy": "no", "max_steps": 2}
    real = trainer(tmp_path, kind=transformers.Trainer, **given)
    real.train()
    assert real.state.global_step == 3
    follower = told(trainer(tmp_path, **given), step(1, 5.0), step(2, 5.0))
    with pytest.raises(ConfigError, match=r"leave control\.should_training_stop false after step 2"):
        follower.finish(tmp_path)


def test_a_checkpoint_that_a_callback_asks_for_is_said_to_be_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    asking = [Asking("on_step_end", "should_save", 1), Asking("on_step_end", "should_evaluate", 1)]
    given = {"save_steps": 2, "eval_dataset": rows(3), "eval_strategy": "steps", "eval_steps": 2, "max_steps": 5}
    told(trainer(tmp_path, **given), *(step(number, 5.0) for number in range(1, 6)))
    assert "has no effect" not in capsys.readouterr().err
    told(trainer(tmp_path, callbacks=asking, **given), *(step(number, 5.0) for number in range(1, 6)))
    said = capsys.readouterr().err
    assert said.count("sets control.should_save at step 1, which has no effect: checkpoints follow save_strategy") == 1
    assert said.count("sets control.should_evaluate at step 1, which has no effect") == 1


def _unfreezes(made: Any) -> None:
    next(made.model.parameters()).requires_grad_(False)


def _makes_harder(made: Any) -> None:
    made.train_dataset.level += 1


def _warms_up(made: Any) -> None:
    made.args.learning_rate = 1.0


def _masks_more(made: Any) -> None:
    made.data_collator.masked += 1


def _scales(made: Any) -> None:
    made.model.transformer.h[1].scale = 2.0


def _hooks(made: Any) -> None:
    made.model.transformer.h[1].mlp.register_forward_hook(lambda module, given, output: output * 0)


def _hooks_before(made: Any) -> None:
    made.model.register_forward_pre_hook(lambda module, given: None)


def _hooks_a_gradient(made: Any) -> None:
    made.model.transformer.wte.weight.register_hook(lambda gradient: gradient * 0)


def _fills(made: Any) -> None:
    made.model.transformer.h[0].attn.seen.fill_(0.5)


def _replaces_a_buffer(made: Any) -> None:
    made.model.transformer.h[0].attn.seen = torch.zeros(2)


def _configures(made: Any) -> None:
    made.model.config.attn_pdrop = 0.9


def _replaces_a_module(made: Any) -> None:
    made.model.transformer.h[1].ln_1 = torch.nn.Identity()


def _replaces_a_method(made: Any) -> None:
    made.model.transformer.h[1].mlp.forward = lambda hidden: hidden * 0


def _replaces_the_data(made: Any) -> None:
    made.train_dataset = rows(8)


def _smooths(made: Any) -> None:
    made.label_smoother = LabelSmoother(epsilon=0.3)


def _weighs(made: Any) -> None:
    made.compute_loss_func.factor = 2.0


CHANGES = [
    (_unfreezes, r"the parameter .*wte"),
    (_makes_harder, r"train_dataset\.level"),
    (_warms_up, r"args\.learning_rate"),
    (_masks_more, r"data_collator\.masked"),
    (_scales, r"model\.transformer\.h\.1\.scale"),
    (_hooks, r"the hooks on model\.transformer\.h\.1\.mlp"),
    (_hooks_before, "the hooks on model:"),
    (_hooks_a_gradient, r"the parameter .*wte"),
    (_fills, r"the buffer transformer\.h\.0\.attn\.seen"),
    (_replaces_a_buffer, r"the buffer transformer\.h\.0\.attn\.seen"),
    (_configures, r"model\.config\.attn_pdrop"),
    (_replaces_a_module, r"model\.transformer\.h\.1\.ln_1"),
    (_replaces_a_method, r"model\.transformer\.h\.1\.mlp\.forward"),
    (_replaces_the_data, "train_dataset:"),
    (_smooths, "label_smoother:"),
    (_weighs, r"compute_loss_func\.factor"),
]


@pytest.mark.parametrize(
    ("change", "named", "event"),
    [
        *((*each, "on_step_begin") for each in CHANGES),
        *((_fills, "the buffer", each) for each in ("on_log", "on_evaluate")),
    ],
)
def test_what_a_callback_changes_that_workers_cannot_see_stops_training_and_is_named(
    change: Callable[[Any], None], named: str, event: str, tmp_path: Path
):
    class Samples(list[Any]):
        level = 0

    class Changing(TrainerCallback):
        def __init__(self) -> None:
            setattr(self, event, self._change)

        def _change(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            if state.global_step == (1 if event == "on_step_begin" else 2):
                change(made)

    class Masking:
        def __init__(self) -> None:
            self.masked = 1

        def __call__(self, samples: list[Any]) -> Any:
            return default_data_collator(samples)

    class Weighing:
        factor = 1.0

        def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
            losses = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
            return self.factor * losses / num_items_in_batch

    samples = Samples(rows(8))
    samples.level = 1
    made = trainer(
        tmp_path, train_dataset=samples, callbacks=[Changing()], num_train_epochs=9, logging_steps=1,
        compute_loss_func=Weighing(),
    )  # fmt: skip
    made.model.transformer.h[0].attn.register_buffer("seen", torch.ones(2))
    made.data_collator = Masking()
    follower = told(made, step(1, 5.0))
    assert not follower.wants_stop
    follower.take(step(2, 5.0))
    follower.take(Evaluated(t_s=1.0, step=2, loss=5.0, num_samples=3, duration_s=0.1))
    assert follower.wants_stop
    with pytest.raises(ConfigError, match=f"{event} changes {named}"):
        follower.finish(tmp_path)


def _copied(model: Any) -> None:
    next(model.parameters()).detach().clone()


def _averaged(model: Any) -> None:
    average = torch.zeros_like(model.transformer.wte.weight)
    average.lerp_(model.transformer.wte.weight, 0.1)


def _averaged_together(model: Any) -> None:
    torch._foreach_mul([*model.parameters()], 0.9)


def _changed(model: Any) -> None:
    next(model.parameters()).mul_(0.5)


def _read_as_memory(model: Any) -> None:
    model.transformer.wte.weight.data.numpy()


def _written_to_a_file(model: Any) -> None:
    torch.save(model, io.BytesIO())


def _saved(model: Any) -> None:
    model.state_dict()


def _deep_copied(model: Any) -> None:
    copy.deepcopy(model)


def _run(model: Any) -> None:
    model(input_ids=torch.ones((1, 4), dtype=torch.int64))


class Using(TrainerCallback):
    """Does something with the model from an event on."""

    def __init__(self, use: Callable[[Any], None], event: str) -> None:
        self.uses: list[int] = []

        def used(args: Any, state: Any, control: Any, *, model: Any, **details: Any) -> None:
            self._use(use, model, state)

        setattr(self, event, used)

    def _use(self, use: Callable[[Any], None], model: Any, state: Any) -> None:
        use(model)
        self.uses.append(state.global_step)


READS = [_copied, _averaged, _averaged_together, _read_as_memory, _written_to_a_file, _saved, _deep_copied, _run]


@pytest.mark.parametrize(
    ("use", "event"),
    [
        *((use, "on_step_end") for use in (*READS, _changed)),
        *((_copied, event) for event in ("on_log", "on_save", "on_evaluate")),
    ],
)
def test_a_callback_that_uses_weights_while_they_are_on_the_nodes_ends_the_run(
    use: Callable[[Any], None], event: str, tmp_path: Path
):
    using = Using(use, event)
    made = trainer(tmp_path, callbacks=[using], num_train_epochs=9, save_steps=1, logging_steps=1)
    before = {name: each.clone() for name, each in made.model.named_parameters()}
    follower = told(made)
    assert not follower.wants_stop
    for entry in (step(1, 5.0), saved(1), Evaluated(t_s=1.0, step=1, loss=5.0, num_samples=3, duration_s=0.1)):
        follower.take(entry)
    assert follower.wants_stop
    assert not using.uses
    with pytest.raises(ConfigError, match=r"Using\._use uses the parameter transformer\.\S+ while training runs"):
        follower.finish(tmp_path)
    assert all(torch.equal(before[name], each) for name, each in made.model.named_parameters())


def test_a_callback_that_hides_its_failures_does_not_hide_this_one(tmp_path: Path):
    class Trying(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **details: Any) -> None:
            with contextlib.suppress(Exception):
                _copied(model)

    follower = told(trainer(tmp_path, callbacks=[Trying()], num_train_epochs=9), step(1, 5.0))
    assert follower.wants_stop
    with pytest.raises(ConfigError, match=r"Trying\.on_step_end uses the parameter"):
        follower.finish(tmp_path)


def test_a_view_that_a_callback_has_had_since_before_is_the_parameter_too(tmp_path: Path):
    made = trainer(tmp_path, num_train_epochs=9)
    views = [each.data.view(-1) for each in made.model.parameters()]
    made.add_callback(Using(lambda model: views[0].sum(), "on_step_end"))  # type: ignore[arg-type,return-value]
    assert told(made, step(1, 5.0)).wants_stop


@pytest.mark.parametrize("use", READS)
def test_the_weights_that_training_begins_with_and_those_it_ends_with_are_a_callbacks_to_use(
    use: Callable[[Any], None], tmp_path: Path
):
    begins, ends = Using(use, "on_train_begin"), Using(use, "on_train_end")
    made = trainer(tmp_path, callbacks=[begins, ends])
    told(made, step(1, 5.0)).finish(checkpoint(tmp_path, model()))
    assert (begins.uses, ends.uses) == ([0], [1])


def test_a_run_that_continues_has_other_weights_from_its_beginning(tmp_path: Path):
    begins = Using(_copied, "on_train_begin")
    made = trainer(tmp_path, callbacks=[begins])
    follower = made.follow(made.job())
    begun = next(entry for entry in run_with_a_loss() if isinstance(entry, PlanAdopted))
    follower.take(dataclasses.replace(begun, restored="step-3", restored_step=3, boundary=3))
    assert follower.wants_stop
    assert not begins.uses


def test_a_checkpoint_of_the_last_step_that_an_earlier_run_took_ends_nothing(tmp_path: Path):
    """What was converted from transformers' last checkpoint is saved once more."""
    made = trainer(tmp_path, max_steps=2, per_device_train_batch_size=4, save_strategy="steps", save_steps=2)
    follower = made.follow(made.job())
    begun = next(entry for entry in run_with_a_loss() if isinstance(entry, PlanAdopted))
    follower.take(dataclasses.replace(begun, restored="step-2", restored_step=2, boundary=2))
    follower.take(saved(2))
    follower.finish(checkpoint(tmp_path, model()))  # raises what a callback does wrong


def test_frozen_parameters_buffers_and_shapes_are_a_callbacks_to_look_at(tmp_path: Path):
    def look(model: Any) -> None:
        model.transformer.wpe.weight.clone()
        model.transformer.h[0].attn.seen.clone()
        assert model.num_parameters() == sum(each.numel() for each in model.parameters())
        for each in model.parameters():
            assert (each.device.type, each.dtype, each.grad) == ("cpu", torch.float32, None)
            assert (each.shape, each.dim()) == (each.size(), each.ndim)
        model.eval()
        model.train()
        model.config.use_cache = not model.config.use_cache
        model.config.to_json_string()
        model.notes = {"seen": [*model.modules()]}
        assert (model.device.type, model.dtype) == ("cpu", torch.float32)

    looks, made = Using(look, "on_step_end"), trainer(tmp_path, num_train_epochs=9)
    made.model.transformer.wpe.weight.requires_grad_(False)
    made.model.transformer.h[0].attn.register_buffer("seen", torch.ones(2))
    made.add_callback(looks)
    assert not told(made, step(1, 5.0), step(2, 5.0)).wants_stop
    assert looks.uses == [1, 2]


# --- trackers, as they are ----------------------------------------------------------------------------------------


def tracked(tmp_path: Path, tracker: str) -> None:
    made = trainer(tmp_path, report_to=[tracker], logging_steps=1, num_train_epochs=2, run_name="e2e")
    follower = told(made, step(1, 5.5), step(2, 5.25))
    follower.finish(checkpoint(tmp_path, model()))


def test_tensorboard_has_the_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    tracked(tmp_path, "tensorboard")
    (file,) = (tmp_path / "board").rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    assert [event.value for event in events.Scalars("train/loss")] == [5.5, 5.25]


def test_mlflow_has_the_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed: it brings twenty packages along")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path / 'mlruns'}")
    tracked(tmp_path, "mlflow")
    (losses,) = (tmp_path / "mlruns").rglob("metrics/loss")
    found = [line.split() for line in losses.read_text().splitlines()]  # time, value, step
    assert {int(step): value for _, value, step in found} == {1: "5.5", 2: "5.25"}


def test_wandb_has_the_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = pytest.importorskip("wandb", reason="W&B is not installed: it brings fifteen packages along")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    tracked(tmp_path, "wandb")
    wandb.finish()
    (directory,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(directory.glob("*.wandb"))
    summary = directory / "files" / "wandb-summary.json"
    assert not summary.exists() or json.loads(summary.read_text())["train/loss"] == 5.25
