"""What has no meaning on nodes is refused by name; what has no effect is said once."""

from __future__ import annotations

import functools
import random
import types
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from oobleck.errors import ConfigError, UsageError
from oobleck.transformers import Trainer
from oobleck.transformers.checks import check_arguments, check_trainer, default_arguments, evaluates_here

from .trainers import arguments, model, rows, trainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def checked(made: transformers.Trainer) -> None:
    """What `train()` does first."""
    check_trainer(made, default_arguments(made.args))


@pytest.mark.parametrize(
    "values",
    [
        {"auto_find_batch_size": True},
        {"train_sampling_strategy": "batch_rebalance"},
        {"average_tokens_across_devices": False},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch", "eval_dataset": rows(3)},
        {"accelerator_config": {"dispatch_batches": True}},
        {"ignore_data_skip": True},
    ],
)
def test_arguments_without_a_meaning_are_refused_by_name(tmp_path: Path, values: dict[str, Any]):
    made = trainer(tmp_path, **values)
    with pytest.raises(ConfigError, match=f"TrainingArguments\\({next(iter(values))}="):
        checked(made)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("fsdp", "the planner splits the model"),
        ("deepspeed", "the planner splits the model"),
        ("parallelism_config", "the planner splits the model"),
    ],
)
def test_what_needs_packages_or_a_network_is_refused_too(tmp_path: Path, name: str, instead: str):
    made = trainer(tmp_path)
    setattr(made.args, name, "full_shard")
    with pytest.raises(ConfigError, match=f"{name}=.*{instead}"):
        checked(made)


def test_an_argument_of_a_version_to_come_is_refused_only_with_a_value(tmp_path: Path):
    """As if all were new."""
    args = default_arguments(arguments(tmp_path))
    check_arguments(args, default_arguments(args), {})
    args.seed = 7
    with pytest.raises(ConfigError, match=r"TrainingArguments\(seed=7\).*this version of Oobleck does not know it"):
        check_arguments(args, default_arguments(args), {})


def test_arguments_without_effect_are_said(tmp_path: Path):
    made = trainer(tmp_path, dataloader_num_workers=2, ddp_timeout=5, save_on_each_node=True)
    with pytest.warns(UserWarning, match=r"without effect .*save_on_each_node.*dataloader_num_workers.*ddp_timeout"):
        checked(made)


def test_defaults_are_said_nothing_about(tmp_path: Path):
    made = trainer(tmp_path)
    default_arguments(made.args)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checked(made)


@pytest.mark.parametrize("event", ["on_pre_optimizer_step", "on_optimizer_step", "on_substep_end"])
def test_a_callback_for_what_happens_within_steps_is_refused_by_name(tmp_path: Path, event: str):
    kind = type("Gradients", (transformers.TrainerCallback,), {event: lambda *_, **details: None})
    checked(trainer(tmp_path, callbacks=[transformers.TrainerCallback(), transformers.PrinterCallback()]))
    with pytest.raises(ConfigError, match=f"callbacks=….: Gradients has {event}, which is not called"):
        checked(trainer(tmp_path, callbacks=[kind()]))


def overriding(*names: str, base: Any = (Trainer,)) -> type:
    """A trainer's kind with methods that do what those of transformers do."""

    def as_it_is(name: str) -> Any:
        return lambda self, *args, **kwargs: getattr(Trainer, name)(self, *args, **kwargs)

    return type("Mine", base, {name: as_it_is(name) for name in names})


def is_refused(tmp_path: Path, name: str, **values: Any) -> bool:
    try:
        checked(trainer(tmp_path, kind=overriding(name), **values))
    except ConfigError as error:
        return f"Trainer.{name} is overridden by Mine: " in str(error)
    return False


CALLED = {"_get_dataloader", "get_train_dataloader",
    "__init__", "train", "call_model_init", "get_decay_parameter_names", "get_optimizer_cls_and_kwargs", "log",
    "get_eval_dataloader", "create_accelerator_and_postprocess", "_get_train_sampler", "_validate_args",
    "_build_accelerator_args", "_move_model_to_device", "_set_signature_columns_if_needed", "_remove_unused_columns",
    "_get_collator_with_removed_columns", "_load_from_checkpoint", "_issue_warnings_after_load", "compute_loss",
    "training_step", "_prepare_inputs", "_prepare_input", "compute_loss_context_manager", "create_optimizer",
    "create_scheduler", "create_optimizer_and_scheduler", "floating_point_ops", "store_flos",
}  # fmt: skip
"""What a run calls in the script, or in workers."""
OF_THE_SCRIPT = {
    "predict", "get_test_dataloader", "num_examples", "save_model", "_save", "save_state", "save_metrics",
    "log_metrics", "metrics_format", "add_callback", "pop_callback", "remove_callback", "create_model_card",
    "init_hf_repo", "push_to_hub", "is_local_process_zero", "is_world_process_zero", "get_learning_rates",
    "get_num_trainable_parameters", "get_optimizer_group", "get_total_train_batch_size", "get_cp_size",
    "get_sp_size", "get_tp_size", "_finish_current_push", "end",
}  # fmt: skip
"""What transformers calls for lines of the script alone, or for what has no meaning here and is said so."""
EVALUATION = {"evaluate", "evaluation_loop", "prediction_step", "get_eval_dataloader", "_get_eval_sampler"}


def test_every_method_that_a_subclass_overrides_is_called_or_refused(tmp_path: Path):
    methods = {name for name, value in vars(transformers.Trainer).items() if isinstance(value, types.FunctionType)}
    accepted = {name for name in methods - {"__init__"} if not is_refused(tmp_path, name)} | {"__init__"}
    assert accepted == (CALLED | OF_THE_SCRIPT | EVALUATION) & methods


def test_samples_without_the_labels_of_the_model_are_evaluated_by_transformers(tmp_path: Path):
    """It computes no loss of them."""
    values = {"eval_strategy": "epoch", "eval_dataset": rows(3)}
    assert not evaluates_here(trainer(tmp_path, **values))
    assert evaluates_here(trainer(tmp_path, label_names=["wanted"], **values))
    assert evaluates_here(trainer(tmp_path, label_names=["labels", "wanted"], **values))
    assert evaluates_here(trainer(tmp_path, label_names=[], **values))


@pytest.mark.parametrize("name", sorted(EVALUATION))
def test_evaluations_of_ones_own_are_the_scripts(tmp_path: Path, name: str):
    assert not evaluates_here(trainer(tmp_path, eval_dataset=rows(3), eval_strategy="epoch"))
    made = trainer(tmp_path, kind=overriding(name), eval_dataset=rows(3), eval_strategy="epoch")
    checked(made)
    assert evaluates_here(made)


def test_methods_of_ones_own_that_nothing_calls_are_fine(tmp_path: Path):
    checked(trainer(tmp_path, kind=type("Mine", (Trainer,), {"my_own": lambda self: None})))


def test_a_method_is_overridden_wherever_that_is_done(tmp_path: Path):
    mixed = type("Mine", (overriding("get_batch_samples", base=(object,)), Trainer), {})
    with pytest.raises(ConfigError, match=r"Trainer\.get_batch_samples is overridden by Mine"):
        checked(trainer(tmp_path, kind=mixed))
    behind = type("Both", (Trainer, overriding("_save_checkpoint", base=(transformers.Trainer,))), {})
    with pytest.raises(ConfigError, match=r"Trainer\._save_checkpoint is overridden by Mine"):
        checked(trainer(tmp_path, kind=behind))
    made = trainer(tmp_path)
    made.get_batch_samples = lambda *_: None
    with pytest.raises(ConfigError, match=r"Trainer\.get_batch_samples is overridden by an attribute of its own"):
        checked(made)


def test_a_method_is_overridden_where_a_script_puts_the_class_in_the_place_of_transformers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(transformers, "Trainer", Trainer)
    with pytest.raises(ConfigError, match=r"Trainer\.get_batch_samples is overridden by Mine"):
        checked(trainer(tmp_path, kind=overriding("get_batch_samples")))


@pytest.mark.parametrize("kind", [Trainer, transformers.Trainer])
def test_a_method_that_is_replaced_on_a_trainers_own_class_is_refused(kind: Any, tmp_path: Path):
    theirs = transformers.Trainer.get_batch_samples

    @functools.wraps(theirs)
    def scaled(self: Any, *given: Any, **named: Any) -> Any:
        return 0.1 * theirs(self, *given, **named)

    kind.get_batch_samples = scaled
    try:
        with pytest.raises(ConfigError, match=r"Trainer\.get_batch_samples is overridden by an assignment to "):
            checked(trainer(tmp_path))
    finally:
        if kind is Trainer:
            del kind.get_batch_samples
        else:
            kind.get_batch_samples = theirs


def test_an_optimizer_without_a_rate_is_refused_by_name(tmp_path: Path):
    """transformers' Adafactor may find its rate by itself, and its schedule reads it from there."""
    from transformers.optimization import Adafactor, AdafactorSchedule

    trained = model()
    optimizer = Adafactor(trained.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
    for schedule in (None, AdafactorSchedule(optimizer)):
        with pytest.raises(ConfigError, match="workers cannot make Adafactor by the options of its groups"):
            trainer(tmp_path, model=trained, optimizers=(optimizer, schedule), max_steps=3).job()


def test_overridden_logs_and_decays_are_not(tmp_path: Path):
    kind = type("Mine", (Trainer,), {"log": lambda self, logs, start_time=None: None})
    checked(trainer(tmp_path, kind=kind))


def test_brought_optimizers_are_made_again_with_their_options(tmp_path: Path):
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (1 + done))
    made = trainer(tmp_path, model=trained, optimizers=(optimizer, schedule), max_steps=3)
    parts = made.job().made
    checked(made)
    (group,) = parts["optimizer"]([{"params": [torch.nn.Parameter(torch.zeros(1))]}]).param_groups
    assert (group["lr"], group["momentum"], parts["decayed"]()) == (0.1, 0.5, frozenset())
    assert [parts["lr_lambda"](step) for step in (1, 2, 3)] == [1, 1 / 2, 1 / 3]


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=6),
    "one cycle": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=7, cycle_momentum=False),
    "a warm-up before another": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        ],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_brought_schedules_have_the_rates_that_they_have_by_themselves(name: str, tmp_path: Path):
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.5)
    schedule = SCHEDULES[name](optimizer)
    job = trainer(tmp_path, model=trained, optimizers=(optimizer, schedule), max_steps=6).job()
    (group,) = job.made["optimizer"]([{"params": [torch.nn.Parameter(torch.zeros(1))]}]).param_groups
    found = [group["lr"] * job.made["lr_lambda"](step) for step in range(1, 7)]
    expected = []
    for _ in range(6):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert found == pytest.approx(expected, rel=1e-12)
    assert len(set(expected)) > 1


class Drawing(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self) -> list[float]:
        return [rate * random.random() for rate in self.base_lrs]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.lr_scheduler.ReduceLROnPlateau, "ReduceLROnPlateau cannot run ahead of training"),
        (partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=7), "OneCycleLR changes momentum at st"),
        (Drawing, "Drawing has other rates when it runs again"),
    ],
)
def test_brought_schedules_that_do_more_than_follow_steps_are_refused_by_name(make: Any, words: str, tmp_path: Path):
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.5)
    with pytest.raises(ConfigError, match=words):
        trainer(tmp_path, model=trained, optimizers=(optimizer, make(optimizer)), max_steps=6).job()


def test_brought_optimizers_that_no_worker_could_make_are_refused_by_name(tmp_path: Path):
    trained = model()
    first, *others = trained.parameters()
    groups = [{"params": [first], "lr": 0.5}, {"params": others}]
    for optimizer, words in (
        (torch.optim.SGD(groups, lr=0.1), "the groups of SGD differ in lr"),
        (torch.optim.SGD(others, lr=0.1), "SGD has not transformer.wte.weight"),
    ):
        with pytest.raises(ConfigError, match=words):
            trainer(tmp_path, model=trained, optimizers=(optimizer, None), max_steps=3).job()


class Endless:
    def __getitem__(self, number: int) -> Any:
        return rows(3)[number % 3]


def test_data_without_a_length_that_is_no_stream_is_refused(tmp_path: Path):
    made = trainer(tmp_path, max_steps=3)
    made.train_dataset = Endless()
    with pytest.raises(ConfigError, match=r"train_dataset=.*no length"):
        checked(made)


def test_a_trainer_trains_once(tmp_path: Path):
    made = trainer(tmp_path, auto_find_batch_size=True)
    with pytest.raises(ConfigError):
        made.train()
    with pytest.raises(UsageError, match="twice"):
        made.train()


def test_the_default_has_what_follows_from_where_to_compute(tmp_path: Path):
    default = default_arguments(arguments(tmp_path))
    assert default.use_cpu
    assert not default.dataloader_pin_memory


def test_a_rank_of_torchrun_starts_no_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = trainer(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UsageError, match="a rank of torchrun"):
        made.train()


def _replaces_the_model(made: Any) -> None:
    made.model = model()


def _enlarges_batches(made: Any) -> None:
    made.args.per_device_train_batch_size = 5


def _changes_the_precision(made: Any) -> None:
    made.args.bf16 = True


def _divides_gradients(made: Any) -> None:
    made.accelerator.gradient_accumulation_steps = 4


def _replaces_the_backward_pass(made: Any) -> None:
    made.accelerator.backward = lambda loss, **others: (3 * loss).backward()


def _scales_the_loss(made: Any) -> None:
    made.args.gradient_accumulation_steps = 2
    made.loss_is_scaled_for_ga = False


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_replaces_the_model, r"Trainer\.model is replaced .* make the trainer with that model"),
        (_enlarges_batches, r"per_device_train_batch_size=5\) is replaced .* batches of 8"),
        (_changes_the_precision, r"Trainer\.accelerator computes in full precision"),
        (_divides_gradients, r"Trainer\.accelerator\.gradient_accumulation_steps is 4"),
        (_replaces_the_backward_pass, r"Trainer\.accelerator\.backward is overridden"),
        (_scales_the_loss, r"Trainer\.loss_is_scaled_for_ga=False"),
    ],
)
def test_an_attribute_that_only_transformers_loop_reads_is_refused_once_it_is_replaced(
    change: Any, named: str, tmp_path: Path
):
    made = trainer(tmp_path)
    checked(made)
    change(made)
    with pytest.raises(ConfigError, match=named):
        checked(made)


def test_a_precision_of_accelerates_environment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ConfigError, match="computes in mixed precision, by ACCELERATE_MIXED_PRECISION"):
        checked(trainer(tmp_path))
    checked(trainer(tmp_path, bf16=True))
    checked(trainer(tmp_path, fp16=True))


def test_a_trainer_made_later_does_not_change_the_precision_of_one_made_before(tmp_path: Path):
    made = trainer(tmp_path)
    default = default_arguments(made.args)
    trainer(tmp_path, bf16=True)
    check_trainer(made, default)


def _reads_other_data(made: Any) -> None:
    made.train_dataset = rows(20)


def _collates_otherwise(made: Any) -> None:
    made.data_collator = transformers.default_data_collator


def _learns_faster(made: Any) -> None:
    made.args.learning_rate = 1.0


def _adapts_the_model(made: Any) -> None:
    made.model = peft.get_peft_model(made.model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"]))


def _is_scaled_as_it_would_be(made: Any) -> None:
    made.args.gradient_accumulation_steps = 2
    made.loss_is_scaled_for_ga = True


@pytest.mark.parametrize(
    "change",
    [_reads_other_data, _collates_otherwise, _learns_faster, _adapts_the_model, _is_scaled_as_it_would_be],
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_an_attribute_that_a_run_reads_may_be_replaced(change: Any, tmp_path: Path):
    made = trainer(tmp_path)
    change(made)
    checked(made)


def test_an_event_within_steps_that_one_object_alone_has_is_refused_too(tmp_path: Path):
    callback = transformers.TrainerCallback()
    callback.on_optimizer_step = lambda *given, **named: None  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="TrainerCallback has on_optimizer_step, which is not called"):
        checked(trainer(tmp_path, callbacks=[callback]))
