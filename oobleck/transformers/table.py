"""The fate of each argument of transformers' `TrainingArguments` and `Trainer`, and of each method of the trainer.

Checks and the page in the documentation follow this table; a test fails for any argument of the installed transformers
that it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial


class Fate(Enum):
    HONOURED = "as in transformers"
    MAPPED = "a key of the job"
    AFTERWARDS = "of `evaluate()` and `predict()`"
    UNUSED = "without effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Rule:
    fate: Fate
    note: str = ""
    """An explanation; for a refused argument, what to do instead."""
    allowed: tuple[object, ...] = ()
    """Values of a refused argument that are accepted, besides the default."""

    def __str__(self) -> str:
        return f"{self.fate.value}{': ' if self.note else ''}{self.note}"


_honoured = partial(Rule, Fate.HONOURED)
_mapped = partial(Rule, Fate.MAPPED)
_unused = partial(Rule, Fate.UNUSED)


def _refused(note: str, *allowed: object) -> Rule:
    return Rule(Fate.REFUSED, note, allowed)


_AFTERWARDS = Rule(Fate.AFTERWARDS)
_EVALUATION = Rule(Fate.AFTERWARDS, "while training runs, too: [Evaluations](#evaluations)")
_WHOLE = "called in the workers with the whole model, which is then [not cut](#models-that-are-kept-whole)"
_OF_DDP = _unused("workers do not use DistributedDataParallel")
_OF_LOADER = _unused("each worker reads its own samples, when a microbatch needs them")
_OF_HUB = _honoured("by `push_to_hub()`, which the script may call after training")
_OTHER_PARALLELISM = "leave it out: the planner splits the model over the nodes"
_OF_OPTIMIZER = _honoured(
    "by the optimizer class that transformers chooses; [its state must fit](training.md#precision-and-memory)"
)

TRAINING_ARGUMENTS: Mapping[str, Rule] = {
    # What is trained, and how long.
    "output_dir": _honoured("with [checkpoints](#checkpoints) of transformers' kind beside the run's own"),
    "per_device_train_batch_size": _mapped(
        "`global_batch_size`, times `gradient_accumulation_steps`, however many nodes there are; a divisor of it is "
        "`microbatch_size`: the largest that leaves eight microbatches a step, or of short rows four"
    ),
    "gradient_accumulation_steps": _mapped("`global_batch_size`"),
    "num_train_epochs": _mapped("`max_steps`, by the length of the dataset"),
    "max_steps": _mapped("`max_steps`"),
    "seed": _mapped("`seed`; samples come in transformers' order, dropout draws other numbers"),
    "data_seed": _honoured(),
    "full_determinism": _honoured("for the lines before and after `train()`"),
    "use_cpu": _mapped("`device`: `cuda` if the machine of the script has a GPU and this is false"),
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), _honoured("the script's own")),
    "resume_from_checkpoint": _honoured("the script's own, to pass to `train()`"),
    # The optimizer.
    **dict.fromkeys(
        ("learning_rate", "optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon"), _OF_OPTIMIZER
    ),
    "weight_decay": _honoured("of the parameters that transformers decays"),
    "max_grad_norm": _mapped("`optimizer.max_grad_norm`"),
    "lr_scheduler_type": _honoured("but `reduce_lr_on_plateau` and `greedy`, which depend on evaluations"),
    "lr_scheduler_kwargs": _honoured(),
    "warmup_steps": _honoured(),
    "warmup_ratio": _honoured("where this version of transformers has it"),
    "optim_target_modules": _refused("leave it out: optimizers of some layers only are not supported"),
    # Losses.
    "label_smoothing_factor": _honoured(),
    "average_tokens_across_devices": _refused("leave it true: the loss is the mean over all tokens of a step"),
    "label_names": _honoured("evaluations have a loss if samples have all of these"),
    "neftune_noise_alpha": _honoured("the model is then [not cut](#models-that-are-kept-whole); other noise is drawn"),
    # Precision, memory and speed.
    "bf16": _mapped("`dtype: bfloat16`"),
    "fp16": _mapped("`dtype: float16`"),
    "tf32": _honoured(),
    "bf16_full_eval": _AFTERWARDS,
    "fp16_full_eval": _AFTERWARDS,
    "activation_checkpointing": _mapped("`recompute: all`"),
    "activation_checkpointing_kwargs": _unused("but `every_n_layers` and `offload`, which are refused"),
    "gradient_checkpointing": _mapped("`recompute: all`"),
    "gradient_checkpointing_kwargs": _unused("but `every_n_layers` and `offload`, which are refused"),
    "torch_compile": _mapped("`compile`"),
    "torch_compile_backend": _refused("leave it out: blocks are compiled by inductor", "inductor"),
    "torch_compile_mode": _mapped("`compile_mode`"),
    "use_liger_kernel": _refused("leave it out: layers compute as the model's own code does"),
    "liger_kernel_config": _refused("leave it out: layers compute as the model's own code does"),
    "use_cache": _unused("training keeps no cache"),
    "torch_empty_cache_steps": _unused("workers keep their memory"),
    "auto_find_batch_size": _refused("leave it out: the planner knows what fits; set per_device_train_batch_size"),
    # Logs and trackers.
    **dict.fromkeys(("logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter"), _honoured()),
    "logging_dir": _honoured("where this version of transformers has it"),
    "log_level": _honoured(),
    "log_level_replica": _unused("the script runs once for its logs"),
    "log_on_each_node": _unused("the script runs once for its logs"),
    "disable_tqdm": _honoured("progress goes to `script.log` in the run's directory"),
    "include_num_input_tokens_seen": _honoured("the script's own process reads the batches, too, to count"),
    "report_to": _honoured(),
    "run_name": _mapped("`tag`, with `-` for what a tag cannot have; without it, the script's name is"),
    **dict.fromkeys(("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), _honoured()),
    "skip_memory_metrics": _refused("leave it out: the profile says how much memory workers need"),
    "debug": _refused("leave it out: set `log_level: debug` in the job"),
    # Evaluations.
    "eval_strategy": _mapped("`eval_steps`: the steps of an epoch, for `epoch`"),
    "eval_steps": _mapped("`eval_steps`"),
    "eval_delay": _honoured(),
    "eval_on_start": _honoured("in the script's own process, unless the run continues from a checkpoint"),
    **dict.fromkeys(("per_device_eval_batch_size", "prediction_loss_only", "eval_do_concat_batches"), _EVALUATION),
    **dict.fromkeys(("eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics"), _EVALUATION),
    **dict.fromkeys(("batch_eval_metrics",), _EVALUATION),
    "load_best_model_at_end": _honoured("the best weights are kept in `checkpoints-best` beside the checkpoints"),
    "metric_for_best_model": _honoured("any metric [of an evaluation](#evaluations)"),
    "greater_is_better": _honoured(),
    # Checkpoints.
    "save_strategy": _mapped(
        "`checkpoint.save_steps`: the steps of an epoch, for `epoch`; for `no`, as often as it pays off, since the "
        "run needs its state; for `best`, at each evaluation"
    ),
    "save_steps": _mapped("`checkpoint.save_steps`"),
    "save_total_limit": _mapped("`checkpoint.save_total_limit`"),
    "save_only_model": _honoured("of the checkpoints in `output_dir`; the run's own have the optimizer's state"),
    "save_on_each_node": _unused("each node saves its own layers"),
    "enable_jit_checkpoint": _refused("leave it out: runs save when a node has notice"),
    "ignore_data_skip": _refused("leave it out: the samples of a step follow from its number"),
    "restore_callback_states_from_checkpoint": _honoured("states are in `trainer.json` in each checkpoint"),
    # Data.
    "remove_unused_columns": _honoured(),
    "train_sampling_strategy": _refused("leave it out, or group_by_length", "random", "sequential", "group_by_length"),
    "length_column_name": _honoured(),
    "group_by_length": _honoured("batches come in another order; rows of models that are cut are padded to one length"),
    "dataloader_drop_last": _honoured(),
    **dict.fromkeys(("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"), _OF_LOADER),
    **dict.fromkeys(("dataloader_prefetch_factor", "dataloader_multiprocessing_context"), _OF_LOADER),
    **dict.fromkeys(("dataloader_in_order",), _OF_LOADER),
    # Other ways to be distributed.
    "accelerator_config": _honoured("`split_batches` alone, as a step's batch is that of all nodes"),
    "parallelism_config": _refused(_OTHER_PARALLELISM),
    "fsdp": _refused(_OTHER_PARALLELISM, []),
    "fsdp_config": _refused(_OTHER_PARALLELISM),
    "deepspeed": _refused(_OTHER_PARALLELISM),
    **dict.fromkeys(
        ("ddp_backend", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_find_unused_parameters", "ddp_static_graph"),
        _OF_DDP,
    ),
    "ddp_timeout": _unused("`control.lease_s` says when a node is lost"),
    "local_rank": _unused("it says nothing about workers"),
    # The hub.
    "push_to_hub": _honoured("after training; nothing is pushed before"),
    **dict.fromkeys(("hub_model_id", "hub_token", "hub_private_repo", "hub_always_push", "hub_revision"), _OF_HUB),
    "hub_strategy": _refused("leave it out: checkpoints are in the run's own format", "end", "every_save"),
}

INIT_ARGUMENTS: Mapping[str, Rule] = {
    "model": _honoured("training starts from its weights, and they are the trained ones afterwards"),
    "args": _honoured("as the table of `TrainingArguments` says"),
    "data_collator": _honoured(
        "called in the workers, for a microbatch at a time; it may draw random numbers, and [is tried](#what-is-tried)"
    ),
    "train_dataset": _honoured("samples by number, or [a stream](#streams)"),
    "eval_dataset": _honoured("one, a dictionary of several, or a stream"),
    "processing_class": _honoured(),
    "model_init": _honoured("called with the seed set, wherever the script runs"),
    "compute_loss_func": _honoured("it must return a sum over samples divided by `num_items_in_batch`, which is tried"),
    "compute_metrics": _EVALUATION,
    "callbacks": _honoured("in the script's own process; there are no gradients to see"),
    "optimizers": _honoured(
        "workers make others of its class and options, in groups that differ by weight decay alone; a schedule may "
        "change rates alone, and runs ahead of training"
    ),
    "optimizer_cls_and_kwargs": _OF_OPTIMIZER,
    "preprocess_logits_for_metrics": _EVALUATION,
}

_LOOP = "is not called: the workers' own loop trains"
_PARTS = "workers read the dataset of its loader by its batch_sampler and collate_fn, a microbatch at a time"

METHODS: Mapping[str, Rule] = {
    "train": _honoured("on the nodes; once in a script"),
    "evaluate": _EVALUATION,
    "predict": _honoured("in the script's own process, on its own devices"),
    "evaluation_loop": _EVALUATION,
    "prediction_step": _EVALUATION,
    "get_eval_dataloader": _EVALUATION,
    **dict.fromkeys(("get_test_dataloader", "num_examples"), _honoured()),
    "save_model": _honoured("where the script calls it; checkpoints are the run's own"),
    "save_state": _honoured(),
    "save_metrics": _honoured(),
    "log": _honoured("it may be overridden"),
    **dict.fromkeys(
        ("log_metrics", "metrics_format", "add_callback", "pop_callback", "remove_callback", "create_model_card"),
        _honoured(),
    ),
    "init_hf_repo": _OF_HUB,
    "push_to_hub": _OF_HUB,
    "is_local_process_zero": _honoured(),
    "is_world_process_zero": _honoured(),
    "get_decay_parameter_names": _honoured("it may be overridden"),
    "get_optimizer_cls_and_kwargs": _honoured("it may be overridden"),
    **dict.fromkeys(("get_learning_rates", "get_num_trainable_parameters", "get_optimizer_group", "end"), _honoured()),
    "call_model_init": _honoured("it may be overridden"),
    "create_accelerator_and_postprocess": _honoured(),
    "get_total_train_batch_size": _honoured("of one process"),
    **dict.fromkeys(("get_cp_size", "get_sp_size", "get_tp_size"), _honoured("1")),
    "training_step": _honoured(f"{_WHOLE}; it must call `self.accelerator.backward` once, which nodes carry out"),
    "compute_loss": _honoured(
        "called in the workers, on a model that is [cut as it is traced](#models-with-a-loss-of-their-own)"
    ),
    "get_batch_samples": _refused(f"it {_LOOP}; give data_collator"),
    "compute_loss_context_manager": _honoured(_WHOLE),
    "autocast_smart_context_manager": _refused(f"it {_LOOP}; set bf16 or fp16"),
    "get_train_dataloader": _honoured(_PARTS),
    "create_optimizer": _honoured("as `optimizers`"),
    "create_scheduler": _honoured("as `optimizers`"),
    "create_optimizer_and_scheduler": _honoured("as `optimizers`"),
    **dict.fromkeys(("floating_point_ops", "store_flos"), _honoured("called in the script's own process")),
    "set_initial_training_values": _refused(f"it {_LOOP}"),
    "hyperparameter_search": _refused("start one run for each trial"),
}
"""Rules for methods that a subclass overrides, and for the use of `hyperparameter_search`. Only the script calls the
methods of `evaluate()`, so overriding one is refused where training evaluates."""

_INTERNAL: Mapping[str, Rule] = {
    **dict.fromkeys(("__init__", "_validate_args", "_build_accelerator_args", "_move_model_to_device"), _honoured()),
    **dict.fromkeys(("_get_train_sampler", "_set_signature_columns_if_needed"), _honoured()),
    **dict.fromkeys(("_remove_unused_columns", "_get_collator_with_removed_columns"), _honoured()),
    **dict.fromkeys(("_save", "_load_from_checkpoint", "_issue_warnings_after_load"), _honoured()),
    **dict.fromkeys(("_finish_current_push",), _honoured()),
    **dict.fromkeys(("_get_eval_sampler",), _EVALUATION),
    "_get_dataloader": _honoured(_PARTS),
    **dict.fromkeys(("_prepare_inputs", "_prepare_input"), _honoured(_WHOLE)),
    "_save_checkpoint": _refused(f"it {_LOOP}, and saves by `save_strategy`; act in a callback's on_save"),
    "_maybe_log_save_evaluate": _refused(f"it {_LOOP}; act in a callback"),
}


def rule_of_method(name: str) -> Rule:
    """Return the rule for a method of transformers' trainer that a subclass overrides."""
    return METHODS.get(name) or _INTERNAL.get(name) or _refused(f"it {_LOOP}; act in a callback, or leave it out")
