"""Checks whether a trainer can be trained here: refuses each unsupported feature by name, with an alternative."""

from __future__ import annotations

import dataclasses
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import transformers
from transformers import TrainerCallback, TrainingArguments
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from transformers.trainer import Trainer as PlainTrainer
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType, has_length

from oobleck.errors import ConfigError
from oobleck.training.data import blaming, items_of
from oobleck.training.model import unwrapped
from oobleck.training.randomness import drawing_alike

from .streams import is_stream
from .table import TRAINING_ARGUMENTS, Fate, Rule, rule_of_method

_UNKNOWN = Rule(Fate.REFUSED, "leave it out: this version of Oobleck does not know it")
_EVALUATION_SCHEDULES = (SchedulerType.REDUCE_ON_PLATEAU, getattr(SchedulerType, "GREEDY", None))
_METHODS = (types.FunctionType, staticmethod, classmethod, property)
_OURS = ("oobleck.transformers", "oobleck.trl")
_OWN_PACKAGES = ("oobleck", "transformers", "torch", "contextlib", "functools")
"""Packages that define methods of trainers, or decorate them."""
_EVENTS_WITHIN_STEPS = ("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end")
_OTHER_RECOMPUTATION = ("every_n_layers", "offload")


def check_trainer(trainer: transformers.Trainer, default: TrainingArguments) -> None:
    """Raise ConfigError for a trainer with an unsupported feature; warn of arguments without effect.

    `default` are the default arguments.
    """
    check_arguments(trainer.args, default)
    _check_methods(trainer)
    _check_attributes(trainer)
    if trainer.lr_scheduler is not None and trainer.optimizer is None:
        raise ConfigError("Trainer(optimizers=(None, …)): give the optimizer as well, or set lr_scheduler_type")
    _check_data(trainer)
    _check_callbacks(trainer)


def evaluates(trainer: Any) -> bool:
    """Return whether training includes evaluations."""
    return trainer.eval_dataset is not None and trainer.args.eval_strategy != IntervalStrategy.NO


def asks_for_best(args: TrainingArguments) -> bool:
    """Return whether the weights with the best evaluation are kept."""
    return bool(args.load_best_model_at_end) or args.save_strategy == SaveStrategy.BEST


def evaluates_here(trainer: Any) -> bool:
    """Return whether the script's own process evaluates while training runs, as workers compute `eval_loss` alone."""
    return evaluates(trainer) and (
        trainer.compute_metrics is not None
        or str(trainer.args.metric_for_best_model or "loss").removeprefix("eval_") != "loss"
        or not _has_samples_by_number(trainer.eval_dataset)
        or any(rule_of_method(name).fate is Fate.AFTERWARDS for name, _ in _overridden(trainer))
        or hears(trainer, "on_prediction_step")
        or not _has_loss(trainer)
    )


def _has_loss(trainer: Any) -> bool:
    """Return whether evaluations have a loss: transformers' have none of samples without the labels of the model."""
    loader = trainer.get_eval_dataloader()
    with blaming("Trainer(eval_dataset=…)"), drawing_alike(0):
        inputs = loader.collate_fn(items_of(loader.dataset, [0]))
    if trainer.label_names:
        return all(inputs.get(name) is not None for name in trainer.label_names)
    asked = inputs.get("return_loss")
    return bool(trainer.can_return_loss if asked is None else asked)


def gathers(trainer: Any) -> bool:
    """Return whether the weights of each evaluation's step are brought into the script's own process."""
    return evaluates_here(trainer) or (
        evaluates(trainer) and (asks_for_best(trainer.args) or hears(trainer, "on_evaluate"))
    )


def hears(trainer: Any, event: str) -> bool:
    """Return whether a callback that is not of transformers has an event."""
    return any(
        not type(each).__module__.startswith("transformers.") and _has_event(each, event)
        for each in trainer.callback_handler.callbacks
    )


def _has_event(callback: Any, event: str) -> bool:
    method = getattr(callback, event, None)  # of the object, which may have its own
    return getattr(method, "__func__", method) not in (None, getattr(TrainerCallback, event))


def _has_samples_by_number(dataset: Any) -> bool:
    return not is_stream(dataset) and not isinstance(dataset, dict) and has_length(dataset)


def overrider_of(trainer: transformers.Trainer, method: str) -> str | None:
    """Name what overrides a method of transformers' trainer; None if nothing does."""
    return next((owner for name, owner in _overridden(trainer) if name == method), None)


def check_arguments(
    args: TrainingArguments, default: TrainingArguments, rules: Mapping[str, Rule] = TRAINING_ARGUMENTS
) -> None:
    """Raise ConfigError for an unsupported argument that is set; warn of those without effect."""
    unused = []
    for field in dataclasses.fields(TrainingArguments):
        name, value = field.name, getattr(args, field.name, None)
        if value == getattr(default, name, None):
            continue
        rule = rules.get(name, _UNKNOWN)
        if rule.fate is Fate.REFUSED and value not in rule.allowed:
            raise ConfigError(f"TrainingArguments({name}={value!r}): {rule.note}")
        if rule.fate is Fate.UNUSED:
            unused.append(f"{name} ({rule.note})")
    _check_values(args)
    if unused:
        warnings.warn(f"TrainingArguments without effect on Oobleck: {', '.join(unused)}", stacklevel=3)


def default_arguments(args: TrainingArguments) -> TrainingArguments:
    """Return the default arguments for the same device."""
    return TrainingArguments(output_dir=args.output_dir, use_cpu=args.use_cpu)


def _check_values(args: TrainingArguments) -> None:
    schedule = args.lr_scheduler_type
    if schedule in _EVALUATION_SCHEDULES or schedule not in TYPE_TO_SCHEDULER_FUNCTION:
        name = getattr(schedule, "value", schedule)
        raise ConfigError(f"TrainingArguments(lr_scheduler_type={name!r}): choose one that follows steps alone")
    for field in dataclasses.fields(AcceleratorConfig):
        value = getattr(args.accelerator_config, field.name)
        if field.name != "split_batches" and value != field.default:
            raise ConfigError(
                f"TrainingArguments(accelerator_config={{{field.name!r}: {value!r}}}): leave it out: workers are not "
                "accelerate's"
            )
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        for key in getattr(args, name, None) or {}:
            if key in _OTHER_RECOMPUTATION:
                raise ConfigError(f"TrainingArguments({name}={{{key!r}: …}}): leave it out: all blocks are recomputed")


def _check_data(trainer: transformers.Trainer) -> None:
    if trainer.train_dataset is None:
        raise ConfigError("Trainer: training needs a train_dataset")
    if not is_stream(trainer.train_dataset) and not has_length(trainer.train_dataset):
        raise ConfigError(
            "Trainer(train_dataset=…): it has no length; give samples by number, or a torch.utils.data.IterableDataset"
        )
    samples = trainer.eval_dataset
    if evaluates(trainer) and not isinstance(samples, Mapping) and has_length(samples) and not len(samples):
        raise ConfigError(
            "Trainer(eval_dataset=…): it has no samples; leave it out, or set TrainingArguments(eval_strategy='no')"
        )


def _check_callbacks(trainer: transformers.Trainer) -> None:
    for callback in trainer.callback_handler.callbacks:
        for event in _EVENTS_WITHIN_STEPS:
            if _has_event(callback, event):
                raise ConfigError(
                    f"Trainer(callbacks=…): {type(callback).__name__} has {event}, which is not called: gradients and "
                    "microbatches are on the nodes; leave it out, or use on_step_end"
                )


def _check_attributes(trainer: Any) -> None:
    """Raise ConfigError for attributes that a script replaces in its trainer, and that only transformers' loop reads.

    All others that change training are read when `train()` is called: arguments, data, collator, losses, callbacks.
    """
    args, accelerator = trainer.args, trainer.accelerator
    # transformers trains the one, with an optimizer for the parameters of the other. PEFT's wrapper has the same model.
    if unwrapped(trainer.model) is not unwrapped(trainer.model_wrapped):
        raise ConfigError(
            "Trainer.model is replaced after the trainer was made, and transformers would train the first one, "
            "model_wrapped; make the trainer with that model"
        )
    size = args.per_device_train_batch_size * max(1, args.n_gpu)
    if trainer._train_batch_size != size:
        raise ConfigError(
            f"TrainingArguments(per_device_train_batch_size={args.per_device_train_batch_size}) is replaced after the "
            f"trainer was made, and transformers would read batches of {trainer._train_batch_size}; make the trainer "
            "with that value"
        )
    # The accelerator's own, since mixed_precision is that of the newest accelerator in the process.
    mixes, wanted = getattr(accelerator, "native_amp", None), args.bf16 or args.fp16
    # It never computes in float16 on a CPU.
    if mixes not in (None, wanted) and not (args.fp16 and args.device.type == "cpu"):
        raise ConfigError(
            f"Trainer.accelerator computes in {'mixed' if mixes else 'full'} precision, by ACCELERATE_MIXED_PRECISION "
            "or from when the trainer was made, and the arguments say otherwise; set TrainingArguments(bf16=…) or fp16 "
            "alone, before the trainer is made"
        )
    if (divisor := accelerator.gradient_accumulation_steps) != 1:
        raise ConfigError(
            f"Trainer.accelerator.gradient_accumulation_steps is {divisor}, and divides all gradients; leave it at 1, "
            "and set TrainingArguments(gradient_accumulation_steps=…)"
        )
    for name, value in vars(accelerator).items():
        if callable(value) and hasattr(type(accelerator), name):
            raise ConfigError(
                f"Trainer.accelerator.{name} is overridden: it is not called: the workers' own loop trains"
            )
    scales = getattr(trainer, "loss_is_scaled_for_ga", None)
    is_scaled = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    is_own = overrider_of(trainer, "compute_loss") is not None  # whose loss is counted as it is
    if scales not in (None, is_scaled) and args.gradient_accumulation_steps > 1 and not is_own:
        raise ConfigError(
            f"Trainer.loss_is_scaled_for_ga={scales}: the loss of a step is the mean over all labels of its batches; "
            "leave it out, or give compute_loss_func"
        )


def _check_methods(trainer: transformers.Trainer) -> None:
    for name, owner in _overridden(trainer):
        rule = rule_of_method(name)
        if rule.fate is Fate.REFUSED:
            raise ConfigError(f"Trainer.{name} is overridden by {owner}: {rule.note}")


def _overridden(trainer: transformers.Trainer) -> Iterator[tuple[str, str]]:
    """Yield the methods of transformers' trainer that are overridden, and what overrides them."""
    # Not `transformers.Trainer`, in whose place a script may have put another class.
    known = {name for name, value in vars(PlainTrainer).items() if isinstance(value, _METHODS)}
    kinds = type(trainer).__mro__
    # Methods resolve in this order, so only the classes before transformers' own can override it.
    for kind in kinds[: kinds.index(PlainTrainer)]:
        if not kind.__module__.startswith(_OURS):
            # TRL's writes a card of the model beside a checkpoint.
            own = {"_save_checkpoint"} if kind.__module__.startswith("trl.") else set()
            yield from ((name, kind.__name__) for name in sorted(known & vars(kind).keys() - own))
    yield from ((name, "an attribute of its own") for name in sorted(known & vars(trainer).keys()))
    # Libraries also replace methods of transformers' class itself, for all scripts that import them.
    for kind in kinds[: kinds.index(PlainTrainer) + 1]:
        if kind is PlainTrainer or kind.__module__.startswith(_OURS):
            yield from (
                (name, f"an assignment to {kind.__module__}.{kind.__name__}")
                for name in sorted(known & vars(kind).keys())
                if _is_foreign(vars(kind)[name])
            )


def _is_foreign(method: object) -> bool:
    # `functools.wraps` copies a function's name and `__module__`; its globals are those of where it was written.
    function = getattr(method, "fget", None) or getattr(method, "__func__", method)
    written_in = getattr(function, "__globals__", {}).get("__name__", "")
    return written_in.partition(".")[0] not in _OWN_PACKAGES
