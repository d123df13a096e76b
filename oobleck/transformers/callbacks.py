"""A script's callbacks: calls them, and stops the run for what they change or ask for without an effect on workers."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Never

import torch
from torch import nn
from transformers import PreTrainedConfig

from oobleck.control.journal import RecoveryDone
from oobleck.errors import ConfigError
from oobleck.training.model import unwrapped

from .elsewhere import OnNodes
from .epochs import Epochs

_HANDED_OVER = (
    *("args", "train_dataset", "eval_dataset", "data_collator", "compute_loss_func", "label_smoother"),
    *("optimizer", "lr_scheduler", "optimizer_cls_and_kwargs"),
)
_PLAIN = (bool, int, float, str, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_NAMES_IN_CONFIG = frozenset(
    {"_name_or_path", "architectures", "id2label", "label2id", "name_or_path", "transformers_version", "use_cache"}
)
"""Values of a configuration that no pass of training reads."""


class Callbacks:
    def __init__(self, trainer: Any, epochs: Epochs, *, max_steps: int) -> None:
        self._trainer, self._epochs, self._max_steps = trainer, epochs, max_steps
        self._has_begun = False
        self._problem = ""
        """What they change without the workers' knowledge, or use although only workers have it."""
        self._stopped_at: int | None = None
        """The step after which one of them has asked for a stop."""
        self._epoch_stopped_in = ""
        """The event in which one of them has asked for the end of the epoch."""
        self._remarked: set[str] = set()
        """Wishes that stderr has been told to be without effect."""
        handler = trainer.callback_handler
        handler.optimizer = OnNodes("the optimizer", self.refuse_use)
        handler.lr_scheduler = OnNodes("the learning rate's scheduler", self.refuse_use)

    @property
    def problem(self) -> str:
        """Why the run is none that the script asks for; empty without a reason."""
        return self._problem

    @property
    def stopped_at(self) -> int | None:
        return self._stopped_at

    def begin(self) -> None:
        """Note that the run has done a step of its own."""
        self._has_begun = True

    @property
    def want_stop(self) -> bool:
        """Whether training is to stop before its last step."""
        step = self._trainer.state.global_step
        # Like transformers, train a step all the same if callbacks stop training before the first one.
        has_begun = self._has_begun or bool(self._problem)
        is_asked = has_begun and bool(self._trainer.control.should_training_stop) and step < self._max_steps
        if is_asked and self._stopped_at is None:
            self._stopped_at = step
        return is_asked

    def call(self, event: str) -> None:
        trainer = self._trainer
        # Training is over by on_train_end, so its errors are the script's own; earlier ones must not end the run.
        with nullcontext() if event == "on_train_end" else self.noting(event), torch.no_grad():
            trainer.control = getattr(trainer.callback_handler, event)(trainer.args, trainer.state, trainer.control)

    def call_on_recovery(self, entry: RecoveryDone) -> None:
        # transformers has no such event, so its handler cannot call it, and most callbacks lack it.
        trainer = self._trainer
        for callback in trainer.callback_handler.callbacks:
            method: Any = getattr(callback, "on_recovery", None)
            if method is not None:
                with self.noting("on_recovery"):
                    method(trainer.args, trainer.state, trainer.control, recovery=entry, text=entry.sentence)

    @contextmanager
    def noting(self, event: str, *, catches: bool = True) -> Iterator[None]:
        """Report errors of callbacks in the block, and stop the run for what they change there.

        Without `catches`, their errors are the caller's.
        """
        before = _handed_over(self._trainer)
        with reported() if catches else nullcontext():
            yield
        is_asked = self._trainer.control.should_epoch_stop
        self._epoch_stopped_in = (self._epoch_stopped_in or event) if is_asked else ""
        if self._problem:
            return
        now = _handed_over(self._trainer)
        if changed := sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)):
            self.stop_for(
                f"a callback's {event} changes {changed[0]}: workers train with what the script had when it called "
                "train(), and see no change; leave it out, or do it before train()"
            )

    def require_due_end(self, step: int) -> None:
        """Stop the run for callbacks that end an epoch early, or training late, as transformers' own loop would."""
        # The epoch ends in any case, and the last one ends training. Steps of an earlier run are over.
        if self._epochs.is_last(step) or not self._has_begun:
            return
        if step == self._max_steps:
            # transformers' DefaultFlowCallback has set it, unless a callback has raised state.max_steps.
            if not self._trainer.control.should_training_stop:
                self.stop_for(
                    f"callbacks leave control.should_training_stop false after step {step}, and workers train no "
                    "further than max_steps; set TrainingArguments(max_steps=…), and keep DefaultFlowCallback"
                )
        elif self._epoch_stopped_in:
            self.stop_for(
                f"a callback's {self._epoch_stopped_in} sets control.should_epoch_stop by step {step}, and workers "
                "train all steps of an epoch; leave it out: give a smaller train_dataset, or a sampler by "
                "_get_train_sampler"
            )

    def remark_on_wishes(self, step: int) -> None:
        """Report once on stderr that a callback asks for a checkpoint or an evaluation that is not due."""
        trainer, state = self._trainer, self._trainer.state
        is_last = step == self._max_steps
        for name, strategy, steps, instead in (
            ("should_save", trainer.args.save_strategy, state.save_steps, "checkpoints follow save_strategy"),
            ("should_evaluate", trainer.args.eval_strategy, state.eval_steps, "evaluations follow eval_strategy"),
        ):
            is_due = strategy == "steps" and (is_last or (bool(steps) and step % steps == 0))
            if getattr(trainer.control, name) and not is_due and name not in self._remarked:
                self._remarked.add(name)
                sys.stderr.write(
                    f"oobleck: a callback sets control.{name} at step {step}, which has no effect: {instead}\n"
                )

    def stop_for(self, problem: str) -> None:
        """Stop the run for a problem: `train()` raises the first one once the run has ended."""
        self._problem = self._problem or problem
        self._trainer.control.should_training_stop = True

    def refuse_weights(self, parameter: str) -> ConfigError:
        """Stop the run for a callback that uses a parameter's value, and return the error.

        The callback may swallow the error: the run stops all the same.
        """
        self.stop_for(
            f"{self._at_work()} uses the parameter {parameter} while training runs: its weights are on the "
            "nodes then, and the script's model has those that it began with; use them in on_save or on_evaluate "
            "of the steps that save_steps and eval_steps name, in on_train_end, or after train()"
        )
        return ConfigError(self._problem)

    def refuse_use(self, what: str) -> Never:
        """Stop the run for a callback that uses what only workers have. Raises ConfigError."""
        self.stop_for(
            f"{self._at_work()} uses {what}, which workers alone have; leave it out: state.log_history has "
            "the learning rate and the gradients' norm of each step, and lr_scheduler_type changes rates"
        )
        raise ConfigError(self._problem)

    def _at_work(self) -> str:
        callbacks = {id(each) for each in self._trainer.callback_handler.callbacks}
        # Callbacks are called through transformers and torch, so the frames tell which one is running.
        frame = sys._getframe(1)
        while (at := frame.f_back) is not None:
            owner = at.f_locals.get("self")
            if id(owner) in callbacks:
                return f"{type(owner).__name__}.{at.f_code.co_name}"
            frame = at
        return "a callback"


@contextmanager
def reported() -> Iterator[None]:
    """Write an error of the block to stderr, and go on."""
    try:
        yield
    # It is the user's code, and training does not depend on it.
    except Exception:  # noqa: BLE001
        traceback.print_exc()


def _handed_over(trainer: Any) -> dict[str, object]:
    """Return the script's values that workers use, by names; objects of which only the identity counts with it."""
    model = unwrapped(trainer.model)
    owners: dict[str, object] = {name: getattr(trainer, name, None) for name in _HANDED_OVER}
    known: dict[str, object] = {name: _identity(owner) for name, owner in owners.items()}
    for name, parameter in model.named_parameters():
        hooks = [_hooks_in(parameter, kind) for kind in _HOOKS_OF_PARAMETERS]
        known[f"the parameter {name}"] = (id(parameter), parameter._version, parameter.requires_grad, hooks)
    for name, buffer in model.named_buffers():
        known[f"the buffer {name}"] = (id(buffer), 0 if buffer.is_inference() else buffer._version)
    for name, module in model.named_modules():
        path = f"model.{name}".removesuffix(".")
        owners[path] = module
        known[path] = _identity(module)
        known[f"the hooks on {path}"] = [_hooks_in(module, kind) for kind in _HOOKS]
        known |= {
            f"{path}.{attribute}": _identity(value) for attribute, value in vars(module).items() if callable(value)
        }
    known["torch's hooks on all modules"] = [_hooks_in(nn.modules.module, f"_global{kind}") for kind in _HOOKS]
    for what, owner in owners.items():
        values = getattr(owner, "__dict__", {})
        known |= {f"{what}.{name}": value for name, value in values.items() if isinstance(value, _PLAIN)}
    return known | _values_of("model.config", getattr(model, "config", None))


def _identity(value: object) -> tuple[int, object]:
    return id(value), value  # held, so that no other takes its address


def _hooks_in(owner: object, kind: str) -> list[tuple[int, object]]:
    return [_identity(hook) for hook in (getattr(owner, kind, None) or {}).values()]


def _values_of(name: str, config: object) -> dict[str, object]:
    known: dict[str, object] = {}
    for key, value in getattr(config, "__dict__", {}).items():
        if isinstance(value, PreTrainedConfig):
            known |= _values_of(f"{name}.{key}", value)
        elif key not in _NAMES_IN_CONFIG:
            known[f"{name}.{key}"] = value if isinstance(value, _PLAIN) else repr(value)
    return known
