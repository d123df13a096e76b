"""A trainer as a job: its settings, and the parts that every worker makes from it.

Methods of transformers' own trainer determine how samples are read and in which order, which parameters are decayed,
and which optimizer and schedule are used.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from transformers import TrainerState, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import SaveStrategy

from oobleck.errors import ConfigError, UncutModel
from oobleck.host.script import GATHERS, SCRIPT_WAITS, Job
from oobleck.job import JobSpec, LossCounting, OptimizerSpec, check_tag, tag_of
from oobleck.training.assembly import try_sharing
from oobleck.training.data import items_of, try_collator, try_repeats
from oobleck.training.flow import Flow
from oobleck.training.model import BatchSizes, LiveModel, ModelStructure, try_layers, unwrapped, with_tried_loss
from oobleck.training.optim import Optimizer
from oobleck.training.padding_trial import try_padding

from .brought import brought_optimizer, brought_schedule, let_create
from .checks import evaluates, evaluates_here, gathers, overrider_of
from .epochs import EpochOrder, Epochs
from .hearing import Hearing, evaluation_steps, steps_to_save, strategy_steps
from .loader import evaluation_batches, training_loader
from .streams import StreamEpochs, StreamOrder, is_stream, opened_stream
from .whole import TrainerLoss, find_counting, why_whole

# This many microbatches of a step keep four stages busy, or two pipelines of two.
_MANY_MICROBATCHES = 8
_ENOUGH_MICROBATCHES = 4
# With fewer tokens in a microbatch, a device spends its time on launching kernels.
_ENOUGH_TOKENS = 1024
# Workers run the script to its `train()`, which may load a model and data.
_START_TIMEOUT_S = 900.0
_NO_CLIPPING = 0.0
_TRIED_LENGTH = 16
"""Tokens of the samples that try the model."""
_TOKENS = "input_ids"


class TrainerJob(Job):
    """The job of a trainer. Reading `settings` reads all samples, to find the longest one."""

    def __init__(self, trainer: Any, *, tag: str) -> None:
        """`tag` names the run where the arguments do not. Raises ConfigError for a trainer that cannot be trained."""
        self._trainer = trainer
        _check_counts(trainer.args)
        self._loader, self.batch_size = training_loader(trainer)  # now: its order depends on the seed of this moment
        self.epochs: Epochs
        if is_stream(self._loader.dataset):
            self._loader, self.epochs = opened_stream(self._loader, trainer.args, self.batch_size)
        else:
            self.epochs = epochs_of(trainer, self._loader)
        self._tag = tag
        let_create(trainer, max_steps=self.max_steps)
        self.made = self._parts()
        self.callbacks = ()
        self._has_whole_batches = False
        """Whether samples are computed, or collated, otherwise with others in their batch."""
        self._why_whole = ""
        """Why the model cannot be cut, once that is known."""

    @property
    def max_steps(self) -> int:
        args = self._trainer.args
        return self.epochs.max_steps(max_steps=args.max_steps, num_epochs=args.num_train_epochs)

    @functools.cached_property
    def settings(self) -> Mapping[str, Any]:  # type: ignore[override]  # computed only where they are used
        """The contents of an equivalent job file. Raises as `check`."""
        self.check()
        given = partial(
            _settings, self._trainer, self.epochs, batch=self.batch_size, max_steps=self.max_steps, tag=self._tag
        )
        if self._structure is not None:
            return given(self._length)
        stages = {} if self.flow is not None else {"num_stages": 1}
        return {**given(self._whole().length(), self._counting), **stages}

    @functools.cached_property
    def _length(self) -> int:
        trainer, loader = self._trainer, self._loader
        loaders = [loader, trainer.get_eval_dataloader()] if _workers_evaluate(trainer) else [loader]
        return max(2, *(longest_row(each) for each in loaders))

    def _require_one_length(self) -> None:
        """Raise ConfigError for a stream whose rows differ in length, where all are needed to know the longest."""
        stream = self._loader.dataset
        lengths = {self._loader.collate_fn([stream[number]])[_TOKENS].shape[-1] for number in range(len(stream))}
        if len(lengths) > 1:
            raise ConfigError(
                f"Trainer(train_dataset=…): the first samples of its stream have {min(lengths)} to {max(lengths)} "
                "tokens, and a model that is cut needs to know the longest of all; pad them to one length, pack them, "
                "or give samples by number"
            )

    def check(self) -> None:
        """Take the model apart, try its layers, its loss, the collator and the optimizer, and draw an epoch's order.

        Says on stderr why a model is kept whole. Raises ConfigError for a trainer that cannot be trained.
        """
        self._order().check()
        Optimizer(OptimizerSpec(), max_steps=self.max_steps, factory=self.made["optimizer"]).layout()
        trainer = self._trainer
        if (structure := self._structure) is None:
            counted = self._counting  # or else raises
            if self.flow is None:
                self._say_why(counted)
            return
        if isinstance(self.epochs, StreamEpochs):
            self._require_one_length()
        num_batches = self.epochs.batches_per_step
        # Without num_items_in_batch, every class returns the mean.
        is_mean = structure.loss_rule.is_mean or not trainer.model_accepts_loss_kwargs
        if is_mean and trainer.compute_loss_func is None and num_batches > 1:
            does = "adds up" if trainer.model_accepts_loss_kwargs else "averages"
            warnings.warn(
                f"{type(unwrapped(trainer.model)).__name__} returns the mean over a batch's labels, and transformers "
                f"{does} those of gradient_accumulation_steps={num_batches} batches; on Oobleck a step has the mean "
                "over all of its labels",
                stacklevel=2,
            )

    def check_for(self, asked: JobSpec) -> None:
        """Check what the job that is asked for has beside the script's own. Raises ConfigError as `check`."""
        if asked.microbatch_size != self.settings["microbatch_size"]:
            self._check_microbatch_size(asked.microbatch_size)
        if asked.devices_per_stage > 1:
            try_sharing(asked, self.made)

    def _check_microbatch_size(self, size: int) -> None:
        """Check what `check` has checked for the default size of a microbatch. Raises ConfigError likewise."""
        if self._structure is not None:
            self._tried(microbatch=size)
            return
        batch, counting = self.batch_size, self._counting
        if counting == "batch" and size != batch:
            raise ConfigError(
                f"microbatch_size is {size}, and the loss is that of a batch of {batch} as a whole, of which no parts "
                "can be added up; leave it out"
            )
        if counting in ("labels", "samples") and batch % size:
            raise ConfigError(
                f"microbatch_size is {size}, and the loss of a step is made of means over batches of {batch} samples; "
                "give a divisor of that"
            )

    @functools.cached_property
    def _structure(self) -> ModelStructure | None:
        """The structure of a model of one chain of blocks, with a loss that is known; None for any other."""
        if overrider_of(self._trainer, "compute_loss") is not None or why_whole(self._trainer):
            return None
        try:
            return self._tried()
        except UncutModel:
            return None

    @functools.cached_property
    def flow(self) -> Flow | None:
        """How a model with a loss of its own is cut; None if it is kept whole, the fallback for what cannot be cut."""
        if self._structure is not None:
            return None
        if why := why_whole(self._trainer):
            self._why_whole = why
            return None
        whole = self._whole()
        try:
            flow = whole.flow()
            whole.prove_cuts(flow)
        except UncutModel as error:
            self._why_whole = error.reason
            return None
        return flow

    @property
    def whole_loss(self) -> TrainerLoss | None:
        """The loss that a model computes by its trainer, None where workers compute it. Raises as `check`."""
        return self._whole() if self._structure is None else None

    @functools.cached_property
    def _counting(self) -> LossCounting:
        """How the loss that a model computes is counted."""
        trainer = self._trainer
        model, loss = unwrapped(trainer.model), self._whole()
        for name in sorted(self.made.keys() & {"data", "eval_data"}):
            samples, collate, place = self.made[name]()
            size = loss.most_together if name == "data" else trainer.args.eval_batch_size
            try_repeats(samples, collate, place=place, batch_size=size)
        ModelStructure.with_its_loss(LiveModel.skeleton_of(model, is_whole=True), loss, sequence_length=_TRIED_LENGTH)
        sizes = _sizes(trainer, self.batch_size, _TRIED_LENGTH)
        loss.require_one_backward(model)
        counting = find_counting(loss, model, batch=sizes.batch, microbatch=sizes.microbatch)
        if self._has_whole_batches:
            counting = "batch"  # whatever the samples that were tried show
        if counting == "batch" and _workers_evaluate(trainer) and trainer.args.eval_batch_size != sizes.batch:
            # Workers would evaluate other batches than the script by itself, with other losses.
            self.made = {name: make for name, make in self.made.items() if name != "eval_data"}
            self.made = {**self.made, GATHERS: lambda: None}
        return counting

    def _say_why(self, counted: LossCounting) -> None:
        if SCRIPT_WAITS in os.environ:
            return  # the script itself, which waits for this run, has said it
        name, how = type(unwrapped(self._trainer.model)).__name__, ""
        if counted == "batch" and self.epochs.batches_per_step == 1:
            how = (
                " (a step is one batch, whose loss is no sum over its parts, so one node computes at a time; raise "
                "gradient_accumulation_steps)"
            )
        sys.stderr.write(f"oobleck: {name} is kept whole on each node{how}: {self._why_whole}\n")

    def _whole(self) -> TrainerLoss:
        return TrainerLoss(
            self._trainer, self._loader, self.epochs, max_steps=self.max_steps, batch_size=self.batch_size
        )

    def _tried(self, *, microbatch: int | None = None) -> ModelStructure:
        # Returns the model's structure. A microbatch must be trained as it is as a part of its batch.
        trainer = self._trainer
        live, replaced = LiveModel.skeleton_of(trainer.model), _loss(trainer)
        structure = ModelStructure.from_live(live, compute_loss=replaced, sequence_length=_TRIED_LENGTH)
        padded = []
        self._has_whole_batches = True  # if a trial raises UncutModel
        for name in sorted(self.made.keys() & {"data", "eval_data"}):
            samples, collate, place = self.made[name]()
            size = self.batch_size if name == "data" else trainer.args.eval_batch_size
            padded.append((try_collator(samples, collate, place=place, batch_size=size), size, place))
        sizes = _sizes(trainer, self.batch_size, self._length)
        if microbatch is not None:
            sizes = replace(sizes, microbatch=microbatch)
        for rows, size, place in padded:
            # Where microbatches are batches, each is padded as by the script itself.
            if sizes.microbatch != size:
                try_padding(structure, rows, place=place)
        self._has_whole_batches = False
        try_layers(structure, sizes)
        return with_tried_loss(structure, sizes)

    def batches_of(self, step: int) -> Iterator[Mapping[str, Any]]:
        """Yield what the collator makes of each batch of a step."""
        return map(self._whole().collated, self._read_order.batches(step))

    @functools.cached_property
    def _read_order(self) -> EpochOrder | StreamOrder:
        return self._order()

    def _order(self) -> EpochOrder | StreamOrder:
        if isinstance(self.epochs, StreamEpochs):
            return self.epochs.order
        return EpochOrder(self._loader, self.epochs, seed=self._trainer.args.seed, batch_size=self.batch_size)

    def _parts(self) -> Mapping[str, Callable[..., Any]]:
        trainer, loader = self._trainer, self._loader
        make_optimizer, peak = _optimizer(trainer)
        parts: dict[str, Callable[..., Any]] = {
            "live_model": lambda: trainer.model,
            "whole": self._whole,
            "data": lambda: (loader.dataset, loader.collate_fn, "Trainer(train_dataset=…)"),
            "order": self._order,
            "optimizer": make_optimizer,
            "decayed": lambda: decayed_parameters(trainer),
            "lr_lambda": brought_schedule(trainer, max_steps=self.max_steps)
            or _schedule(trainer, max_steps=self.max_steps, peak=peak),
        }
        if gathers(trainer):
            parts[GATHERS] = lambda: None
        if _workers_evaluate(trainer):
            evaluated = trainer.get_eval_dataloader()
            parts["eval_data"] = lambda: (evaluated.dataset, evaluated.collate_fn, "Trainer(eval_dataset=…)")
            parts["eval_batches"] = lambda: evaluation_batches(trainer, evaluated)
        if (compute_loss := _loss(trainer)) is not None:
            parts["compute_loss"] = compute_loss
        return parts


def _workers_evaluate(trainer: Any) -> bool:
    return evaluates(trainer) and not evaluates_here(trainer)


def epochs_of(trainer: Any, loader: Any) -> Epochs:
    """Return how the loader of a trainer's training data is divided into steps."""
    num_batches = len(loader)
    if not num_batches:
        raise ConfigError(
            f"Trainer(train_dataset=…): {len(loader.dataset)} samples are no batch of "
            f"{trainer.args.train_batch_size}; lower per_device_train_batch_size, or leave dataloader_drop_last out"
        )
    return Epochs(num_batches=num_batches, batches_per_step=trainer.args.gradient_accumulation_steps)


def _check_counts(args: TrainingArguments) -> None:
    """Raise ConfigError for arguments by which no step has a sample, or there is no step."""
    if args.gradient_accumulation_steps < 1:
        accumulated = args.gradient_accumulation_steps
        raise ConfigError(f"TrainingArguments(gradient_accumulation_steps={accumulated}): it must be at least 1")
    if args.max_steps < 1 and args.num_train_epochs <= 0:
        raise ConfigError(
            f"TrainingArguments(num_train_epochs={args.num_train_epochs}): there would be no step to train; raise it, "
            "or set max_steps"
        )


def _tag(run_name: str | None, script: str) -> str:
    """Return the run's name: the one that is asked for, as far as a directory can have it, or else the script's."""
    if not run_name:
        return tag_of(script, otherwise="trainer")
    try:
        check_tag(run_name)
    except ConfigError:
        # The digest keeps names apart that differ in nothing else.
        digest = hashlib.sha256(run_name.encode()).hexdigest()[:8]
        tag = f"{tag_of(run_name, otherwise='')[:24].rstrip('.-')}-{digest}".lstrip("-")
        warnings.warn(f"TrainingArguments(run_name={run_name!r}): the run is called {tag}", stacklevel=2)
        return tag
    return run_name


def _settings(
    trainer: Any,
    epochs: Epochs,
    length: int,
    counting: LossCounting | None = None,
    *,
    batch: int,
    max_steps: int,
    tag: str,
) -> dict[str, Any]:
    """With `counting`, the model computes its own loss."""
    args = trainer.args
    state = strategy_steps(args, max_steps)
    sizes, brought = _sizes(trainer, batch, length), brought_optimizer(trainer)
    peak = args.learning_rate if brought is None else brought.options["lr"]
    embedding = trainer.model.get_input_embeddings() if counting is None else None
    asked = (getattr(args, name, None) for name in ("activation_checkpointing", "gradient_checkpointing"))
    recomputes = any(asked) or any(getattr(each, "gradient_checkpointing", False) for each in trainer.model.modules())
    settings = {
        "tag": _tag(args.run_name, tag),
        "model": {"type": "script", **({"whole_loss": counting} if counting else {})},
        "data": {
            "sequence_length": length,
            # A job's least vocabulary: 256 bytes and an end.
            "vocab_size": max(257, 0 if embedding is None else embedding.num_embeddings),
        },
        "optimizer": {
            **({"learning_rate": peak} if peak > 0 else {}),
            "weight_decay": args.weight_decay if brought is None else brought.weight_decay,
            "max_grad_norm": max(args.max_grad_norm or 0.0, _NO_CLIPPING),
        },
        "max_steps": max_steps,
        "global_batch_size": sizes.batch * args.gradient_accumulation_steps,
        "microbatch_size": sizes.batch if counting == "batch" else sizes.microbatch,
        "dtype": _dtype(trainer),
        "device": "cpu" if args.use_cpu or not torch.cuda.is_available() else "cuda",
        "seed": args.seed,
        "recompute": "all" if recomputes else "none",
        "compile": args.torch_compile,
        "compile_mode": args.torch_compile_mode or "default",
        "checkpoint": {},
        "control": {"start_timeout_s": _START_TIMEOUT_S},
    }
    if (eval_steps := evaluation_steps(trainer, epochs, state)) is not None:
        settings["eval_steps"] = eval_steps
    if Hearing(trainer, epochs, max_steps=max_steps).is_wanted:
        settings["control"]["waits_for_script"] = True
    settings["checkpoint"] = _checkpoints(trainer, state, epochs, eval_steps=settings.get("eval_steps"))
    return settings


def longest_row(loader: Any) -> int:
    """Return the length of the longest row that a loader's collator makes. Reads all samples.

    Raises ConfigError for samples without tokens.
    """
    # Pipelines need microbatches of one length.
    dataset, collate = loader.dataset, loader.collate_fn
    column: Iterable[Any]
    form: Any = getattr(dataset, "format", None)
    # A transform may pad all rows of a column alike, and rows are read a microbatch at a time.
    has_transform = isinstance(form, Mapping) and form.get("type") == "custom"
    if _TOKENS in (getattr(dataset, "column_names", None) or ()) and not has_transform:
        column = dataset[_TOKENS]  # reads no other column
    else:
        column = (_tokens_of(dataset[number]) for number in range(len(dataset)))
    # A sample without tokens counts as empty: its collator adds them.
    longest, _ = max(enumerate(column), key=lambda item: 0 if item[1] is None else len(item[1]))
    row = collate(items_of(dataset, [longest]))
    if _TOKENS not in row:
        raise ConfigError(f"Trainer: data_collator returns no {_TOKENS}; it returns {', '.join(sorted(row))}")
    length: int = row[_TOKENS].shape[-1]
    return length


def _tokens_of(item: Any) -> Any:
    return item.get(_TOKENS) if isinstance(item, Mapping) or hasattr(item, "keys") else None


def _sizes(trainer: Any, batch: int, length: int) -> BatchSizes:
    microbatch = microbatch_size_of(batch, batch * trainer.args.gradient_accumulation_steps, length)
    return BatchSizes(batch=batch, microbatch=microbatch, length=length)


def microbatch_size_of(batch_size: int, global_batch_size: int, length: int) -> int:
    """Return the largest divisor of a batch that leaves many microbatches; for short rows, one that leaves enough."""
    # It must not depend on the nodes, because dropout and collators draw random numbers for each microbatch.
    sizes = [size for size in range(1, batch_size + 1) if batch_size % size == 0]
    many, enough = (
        max((size for size in sizes if global_batch_size // size >= number), default=1)
        for number in (_MANY_MICROBATCHES, _ENOUGH_MICROBATCHES)
    )
    long = next((size for size in sizes if size * length >= _ENOUGH_TOKENS), batch_size)
    return min(max(many, long), enough)


def _dtype(trainer: Any) -> str:
    args, of_model = trainer.args, next(trainer.model.parameters()).dtype
    if of_model == torch.float64:
        if args.bf16 or args.fp16:
            raise ConfigError("TrainingArguments: the model is of float64; leave bf16 and fp16 out")
        return "float64"
    if args.fp16 or of_model == torch.float16:
        return "float16"
    return "bfloat16" if args.bf16 or of_model == torch.bfloat16 else "float32"


def _checkpoints(trainer: Any, state: TrainerState, epochs: Epochs, *, eval_steps: int | None) -> dict[str, Any]:
    args, limit = trainer.args, trainer.args.save_total_limit
    every = steps_to_save(args, epochs, state)
    steps = eval_steps if args.save_strategy == SaveStrategy.BEST else every
    return {
        # As transformers, which writes each of them before the next step.
        **({"save_steps": steps, "waits_for_disk": every is not None} if steps else {}),
        **({"save_total_limit": limit} if limit and limit > 0 else {}),
    }


def _optimizer(trainer: Any) -> tuple[Callable[[list[dict[str, Any]]], Any], float]:
    """Return the function that makes the optimizer from parameter groups, and its peak rate.

    Raises ConfigError for an optimizer that needs the whole model.
    """
    if (brought := brought_optimizer(trainer)) is not None:
        return brought.make, brought.options["lr"]
    try:
        made = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"TrainingArguments(optim={_value_of(trainer.args.optim)!r}): {error}") from error
    kind, arguments = made
    if not issubclass(kind, torch.optim.Optimizer) or {"params", "model", "optimizer_dict"} & arguments.keys():
        raise ConfigError(
            f"TrainingArguments(optim={_value_of(trainer.args.optim)!r}): {kind.__name__} needs the whole model, which "
            "no worker has; choose another, such as adamw_torch"
        )
    return lambda groups: kind(groups, **arguments), arguments.get("lr", trainer.args.learning_rate)


def optimizer_options(trainer: Any) -> list[dict[str, object]]:
    """Return the options of the optimizer's two groups, with and without weight decay. Raises ConfigError."""
    make, _ = _optimizer(trainer)
    brought = brought_optimizer(trainer)
    decays = (trainer.args.weight_decay if brought is None else brought.weight_decay, 0.0)
    made = make([{"params": [torch.nn.Parameter(torch.zeros(1))], "weight_decay": decay} for decay in decays])
    return [{name: value for name, value in group.items() if name != "params"} for group in made.param_groups]


def _schedule(trainer: Any, *, max_steps: int, peak: float) -> Callable[[int], float]:
    """Return the factor of the learning rate at each step, from 1, by transformers' schedules."""
    args = trainer.args
    # The factors depend on the step alone, and in some schedules on the peak rate, which they read from an optimizer.
    stand_in = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    made = transformers.get_scheduler(
        args.lr_scheduler_type,
        optimizer=stand_in,
        num_warmup_steps=args.get_warmup_steps(max_steps),
        num_training_steps=max_steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs or {},
    )
    if not isinstance(made, torch.optim.lr_scheduler.LambdaLR):
        raise ConfigError(
            f"TrainingArguments(lr_scheduler_type={_value_of(args.lr_scheduler_type)!r}): it is not a function of the "
            "step alone; choose another"
        )
    factor = made.lr_lambdas[0]
    # transformers' schedules count steps from 0.
    return lambda step: float(factor(step - 1))


def decayed_parameters(trainer: Any) -> frozenset[str]:
    """Return all names of the decayed parameters, without PEFT's prefixes."""
    named = dict(trainer.model.named_parameters(remove_duplicate=False))
    # transformers names each parameter once, and a tied one has other names too.
    brought = brought_optimizer(trainer)
    decayed: Collection[int] = (
        brought.decayed
        if brought is not None
        else {id(named[name]) for name in trainer.get_decay_parameter_names(trainer.model) if name in named}
    )
    own = unwrapped(trainer.model).named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in own if id(parameter) in decayed)


def _loss(trainer: Any) -> Callable[..., torch.Tensor] | None:
    if trainer.compute_loss_func is not None:
        replacement: Callable[..., torch.Tensor] = trainer.compute_loss_func
        return replacement
    # transformers makes it when the trainer is made, and the script may have replaced it since.
    smoother: Callable[..., torch.Tensor] | None = trainer.label_smoother
    # transformers decides by the class in the same way.
    shifts = type(unwrapped(trainer.model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return functools.partial(smoother, shift_labels=True) if smoother is not None and shifts else smoother


def _value_of(name: Any) -> str:
    # Arguments may be members of transformers' enums, or their values.
    return str(getattr(name, "value", name))
