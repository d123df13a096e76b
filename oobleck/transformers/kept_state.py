"""A trainer's state as of each step, in the checkpoints of its run, as transformers keeps it in its own."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer_callback import ExportableState

from oobleck.training.checkpoint import attach, attached, is_trainer_checkpoint

# Not transformers' name, by which a directory is one of its own checkpoints.
_FILE = "trainer.json"
_MOST_STEPS = 4096
"""A checkpoint is on the disk some steps after its own, and has no state after more than these."""
_OF_STEP = ("epoch", "num_input_tokens_seen", "total_flos", "best_metric", "best_global_step")
_RESTORED = (*_OF_STEP, "global_step", "log_history", "stateful_callbacks")


def new_state(trainer: Any, *, is_saved: bool = False) -> TrainerState:
    """Return a state that has those of the trainer's callbacks; `is_saved` says whether its step is saved by now."""
    # transformers takes the states just before it calls on_save, which takes the wish back.
    control = dataclasses.replace(trainer.control, should_save=True) if is_saved else trainer.control
    handled = [*trainer.callback_handler.callbacks, control]
    stateful: list[Any] = [each for each in handled if isinstance(each, ExportableState)]
    return TrainerState(stateful_callbacks=stateful)


class KeptStates:
    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._steps: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def note(self, *, is_saved: bool = False) -> None:
        """Note the state of the step that is done; `is_saved` as in `new_state`."""
        state = self._trainer.state
        self._steps[state.global_step] = {
            **{name: getattr(state, name) for name in _OF_STEP},
            "stateful_callbacks": copy.deepcopy(new_state(self._trainer, is_saved=is_saved).stateful_callbacks),
            "num_logs": len(state.log_history),
        }
        if len(self._steps) > _MOST_STEPS:
            self._steps.popitem(last=False)

    def counts_after(self, step: int) -> tuple[int, float] | None:
        """Return the tokens and the floating-point operations up to a step; None for one that is not known."""
        kept = self._steps.get(step)
        return None if kept is None else (kept["num_input_tokens_seen"], kept["total_flos"])

    def give_callbacks(self, step: int) -> None:
        """Put the states that callbacks had at a step into the trainer's, as transformers does when it saves one."""
        if (kept := self._steps.get(step)) is not None:
            self._trainer.state.stateful_callbacks = copy.deepcopy(kept["stateful_callbacks"])

    def write(self, checkpoints: Path, name: str, step: int) -> None:
        """Write the state of a step into its checkpoint."""
        # A full disk costs a later script its state, and nothing else.
        with suppress(OSError):
            if (content := self.content(step)) is not None:
                attach(checkpoints / name, _FILE, content.encode())

    def content(self, step: int) -> str | None:
        """Return the state of a step as transformers writes it; None if it is not known, or no JSON."""
        if (kept := self._steps.get(step)) is None:
            return None
        of_step = dict(kept)
        logs = self._trainer.state.log_history[: of_step.pop("num_logs")]
        state = dataclasses.replace(self._trainer.state, **of_step, global_step=step, log_history=logs)
        with suppress(TypeError):  # of a callback's value
            return json.dumps(dataclasses.asdict(state), indent=2) + "\n"
        return None

    def read(self, place: Path) -> bool:
        """Give the trainer the state in a checkpoint, and its callbacks theirs; returns whether there is one."""
        with suppress(OSError, ValueError, LookupError, TypeError):
            kept = json.loads(attached(place, _FILE))
            values = {each: kept[each] for each in _RESTORED}  # all, or none
            for each, value in values.items():
                setattr(self._trainer.state, each, value)
            if (best := kept.get("best_model_checkpoint")) and is_trainer_checkpoint(Path(best)):
                self._trainer.state.best_model_checkpoint = best  # or else the run has the best weights beside its own
            self._trainer._load_callback_state()
            return True
        return False


def adopt_state(checkpoint: Path, converted: Path) -> TrainerState:
    """Take over the state in a checkpoint of transformers for one made of it, and return it. Raises OSError."""
    state: TrainerState = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    attach(converted, _FILE, json.dumps(dataclasses.asdict(state)).encode())
    return state
