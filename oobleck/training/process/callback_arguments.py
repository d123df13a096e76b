"""A job as transformers' `TrainingArguments`, for callbacks that ask it for more than single values.

Trackers write all arguments down (`to_dict`, `to_json_string`, `to_sanitized_dict`), so a few names are not enough.
"""

from __future__ import annotations

from dataclasses import MISSING, fields

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType

from oobleck.job import JobSpec


class JobArguments(TrainingArguments):
    """What a job says, by the names of `TrainingArguments`; what it does not say is transformers' default.

    The constructor of the class itself is left out: it sets devices and processes up, and wants the package
    accelerate for that.
    """

    def __init__(self, job: JobSpec) -> None:
        for field in fields(TrainingArguments):
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            setattr(self, field.name, None if default is MISSING else default)
        for name, value in _values(job).items():
            setattr(self, name, value)
        self.job = job
        self.distributed_state = None
        self._n_gpu = 0
        self.__dict__["_setup_devices"] = torch.device("cpu")  # of this process, which computes nothing

    @property
    def train_batch_size(self) -> int:
        """Samples of a step."""
        return self.job.global_batch_size

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.to_json_string()})"  # type: ignore[no-untyped-call]  # transformers' own

    __repr__ = __str__


def _values(job: JobSpec) -> dict[str, object]:
    optimizer, checkpoint = job.optimizer, job.checkpoint
    return {
        "run_name": job.tag,
        "output_dir": job.tag,
        "report_to": [],
        "max_steps": job.max_steps,
        "per_device_train_batch_size": job.microbatch_size,
        "per_device_eval_batch_size": job.microbatch_size,
        "seed": job.seed,
        "bf16": job.dtype == "bfloat16",
        "fp16": job.dtype == "float16",
        "use_cpu": job.device == "cpu",
        "gradient_checkpointing": job.activation_checkpointing,
        "torch_compile": job.compile,
        "eval_strategy": IntervalStrategy.NO if job.eval_steps is None else IntervalStrategy.STEPS,
        "eval_steps": job.eval_steps,
        "logging_strategy": IntervalStrategy.STEPS,
        "logging_steps": 1,
        "save_strategy": SaveStrategy.STEPS if checkpoint.enabled else SaveStrategy.NO,
        "save_steps": checkpoint.save_steps,
        "save_total_limit": checkpoint.save_total_limit,
        "optim": optimizer.optim,
        "learning_rate": optimizer.learning_rate,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.adam_beta1,
        "adam_beta2": optimizer.adam_beta2,
        "adam_epsilon": optimizer.adam_epsilon,
        "max_grad_norm": optimizer.max_grad_norm,
        "lr_scheduler_type": SchedulerType(optimizer.lr_scheduler_type),
        "lr_scheduler_kwargs": dict(optimizer.lr_scheduler_kwargs),
        "warmup_steps": optimizer.warmup_steps,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
        "load_best_model_at_end": True,
    }
