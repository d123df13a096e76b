"""Workers wait for a script where its callbacks can stop training, and where it saves, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import EarlyStoppingCallback, ProgressCallback, TrainerCallback

from oobleck.transformers import Trainer
from oobleck.transformers.hearing import Hearing
from tests.control.journals import run_with_a_loss

from .test_follower import step
from .trainers import rows, trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:'pin_memory':UserWarning"
)
EVALUATES = {"eval_dataset": rows(3), "eval_strategy": "steps", "eval_steps": 5}


def having(*events: str) -> TrainerCallback:
    methods: dict[str, Any] = {event: lambda *args, **details: None for event in events}
    return type("Own", (TrainerCallback,), methods)()  # type: ignore[no-any-return]


class Logging(Trainer):
    def log(self, *args: Any, **named: Any) -> None:
        super().log(*args, **named)


def asked(made: Any) -> tuple[list[int], bool]:
    """The steps of three epochs of six steps at which workers wait, and whether the job says that they do."""
    job = made.job()
    hearing = Hearing(made, job.epochs, max_steps=job.max_steps)
    assert job.max_steps == 18
    return [number for number in range(1, 19) if hearing.is_asked(number)], hearing.is_wanted


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ({}, []),
        ({"callbacks": [ProgressCallback(), having("on_train_end", "on_save")], **EVALUATES}, []),
        ({"callbacks": [having("on_step_end")]}, [*range(1, 19)]),
        ({"callbacks": [having("on_step_begin")]}, [*range(1, 19)]),
        ({"callbacks": [having("on_log")], "logging_steps": 7}, [7, 14]),
        ({"callbacks": [having("on_log")], "logging_steps": 7, "logging_first_step": True, **EVALUATES},
         [1, 5, 7, 10, 14, 15, 18]),
        ({"callbacks": [having("on_log")], "logging_strategy": "epoch"}, [6, 12, 18]),
        ({"kind": Logging, "logging_steps": 9}, [9, 18]),
        ({"callbacks": [having("on_epoch_end")]}, [1, 6, 7, 12, 13, 18]),
        ({"callbacks": [having("on_evaluate")], **EVALUATES}, [5, 10, 15, 18]),
        ({"callbacks": [having("on_evaluate")], **EVALUATES, "eval_strategy": "epoch"}, [6, 12, 18]),
        ({"callbacks": [EarlyStoppingCallback(1)], **EVALUATES}, [5, 10, 15, 18]),
        ({"callbacks": [EarlyStoppingCallback(1)]}, []),
        ({"save_strategy": "steps", "save_steps": 7}, [7, 14]),
        ({"save_strategy": "epoch"}, [6, 12, 18]),
        ({"save_strategy": "best", "metric_for_best_model": "loss", **EVALUATES}, []),
    ],
)  # fmt: skip
def test_workers_wait_where_callbacks_hear(tmp_path: Path, values: dict[str, Any], steps: list[int]):
    made = trainer(
        tmp_path, **{"per_device_train_batch_size": 2, "logging_steps": 100, "save_strategy": "no", **values}
    )
    assert asked(made) == (steps, bool(steps))
    assert made.job().settings["control"].get("waits_for_script", False) == bool(steps)


def test_callbacks_that_stop_training_before_it_begins_have_one_step_of_it(tmp_path: Path):
    class Stopping(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            control.should_training_stop = True

    made = trainer(tmp_path, callbacks=[Stopping()], num_train_epochs=9, save_strategy="no")
    follower = made.follow(made.job())
    follower.take(next(entry for entry in run_with_a_loss() if type(entry).__name__ == "PlanAdopted"))
    assert not follower.wants_stop
    assert follower.take_allowed() == (0, 1)
    follower.take(step(1, 5.0))
    assert follower.wants_stop
