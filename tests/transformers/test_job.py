"""A trainer's job: what transformers would do, as settings and parts."""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from transformers.trainer_pt_utils import LabelSmoother

from oobleck.cli.inputs import load_job
from oobleck.errors import ConfigError
from oobleck.host.handover import receiving
from oobleck.job import JobSpec
from oobleck.training.model import unwrapped
from oobleck.transformers import Trainer
from oobleck.transformers.job import longest_row, microbatch_size_of

from .trainers import VOCAB_SIZE, collate, model, rows, trainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:'pin_memory' argument:UserWarning")


def settings(tmp_path: Path, **values: Any) -> dict[str, Any]:
    return dict(trainer(tmp_path, **values).job().settings)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}, (16, 4)),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}, (32, 4)),
        ({"per_device_train_batch_size": 8}, (8, 2)),
        ({"per_device_train_batch_size": 3}, (3, 1)),
    ],
)
def test_the_batch_is_that_of_one_process_however_it_is_divided(
    tmp_path: Path, values: dict[str, Any], expected: tuple[int, int]
):
    found = settings(tmp_path, count=64, **values)
    assert (found["global_batch_size"], found["microbatch_size"]) == expected


@pytest.mark.parametrize(("length", "expected"), [(16, 4), (128, 4), (256, 4), (512, 2), (1024, 2), (2048, 2)])
def test_microbatches_of_short_rows_are_larger_as_long_as_there_are_enough(length: int, expected: int):
    assert microbatch_size_of(16, 16, length) == expected


def test_a_batch_that_has_enough_microbatches_anyway_is_not_divided():
    assert microbatch_size_of(4, 64, 16) == 4
    assert microbatch_size_of(1, 4, 16) == 1


def left(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {name: value.flip(1) for name, value in collate([flipped(row) for row in rows]).items()}


def flipped(row: dict[str, list[int]]) -> dict[str, list[int]]:
    return {name: value[::-1] for name, value in row.items()}


def test_batches_whose_padding_shifts_positions_are_not_cut(tmp_path: Path):
    def settings(**values: Any) -> Any:
        made = trainer(tmp_path, **values)
        made.data_collator = left
        return made.job().settings

    not_cut = settings(per_device_train_batch_size=8)
    assert (not_cut["model"]["whole_loss"], not_cut["microbatch_size"]) == ("batch", 8)
    assert "whole_loss" not in settings(per_device_train_batch_size=4, gradient_accumulation_steps=4)["model"]


def test_samples_at_equal_distances_are_not_taken_for_all(tmp_path: Path):
    made = trainer(tmp_path, per_device_train_batch_size=8)
    tokens = [[1 + (3 * row + at) % 90 for at in range(4 + row % 9)] for row in range(64)]
    made.train_dataset = [dict.fromkeys(("input_ids", "attention_mask", "labels"), row) for row in tokens]
    made.data_collator = left
    assert made.job().settings["model"]["whole_loss"] == "batch"


def test_another_size_of_microbatch_is_tried_as_the_default_is(tmp_path: Path):
    made = trainer(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=4)
    made.data_collator = left
    job = made.job()
    assert job.settings["microbatch_size"] == 4
    job.check_for(JobSpec(microbatch_size=4))
    with pytest.raises(ConfigError, match=r"Trainer\(train_dataset=…\): data_collator left \(.*:\d+\) pads samples on"):
        job.check_for(JobSpec(microbatch_size=2))


def documents(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Two documents a row."""
    made = collate(batch)
    ids = made["input_ids"]
    positions = torch.arange(ids.shape[1]).expand_as(ids) % 2
    return {"input_ids": ids, "labels": made["labels"], "position_ids": positions}


def llama() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=VOCAB_SIZE, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "collator", "asked", "words"),
    [
        (llama, left, {"context_parallel": 2}, "samples with attention_mask cannot be shared"),
        (llama, documents, {"context_parallel": 2}, "samples with position_ids cannot be shared"),
        (llama, collate, {"context_parallel": 2}, ""),
        (llama, collate, {"expert_parallel": True}, "expert_parallel: "),
        (model, collate, {"context_parallel": 2}, "it has dropout"),
    ],
)
def test_what_devices_cannot_share_is_refused_before_anything_is_launched(
    tmp_path: Path, make: Any, collator: Any, asked: dict[str, Any], words: str
):
    made = trainer(tmp_path, model=make(), per_device_train_batch_size=8)
    made.data_collator = collator
    job = made.job()
    spec = load_job(json.dumps(job.settings), source="the script", base=JobSpec(), has_lines=False)
    spec = replace(spec, data=replace(spec.data, sequence_length=8), sharding="all", sharding_devices=2)
    with pytest.raises(ConfigError, match=words) if words else contextlib.nullcontext():
        job.check_for(replace(spec, **asked))


class Mean(transformers.GPT2LMHeadModel):
    """Its loss is a mean, whatever it is told of the batch."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **others: Any) -> Any:
        logits = super().forward(input_ids=input_ids, attention_mask=attention_mask, **others).logits
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def test_means_of_batches_that_are_accumulated_are_not_weighed_otherwise_without_a_word(tmp_path: Path):
    accumulated = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    with pytest.warns(UserWarning, match="Mean returns the mean over a batch's labels, and transformers adds up those"):
        trainer(tmp_path, model=Mean(model().config), **accumulated).job().check()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(tmp_path, model=Mean(model().config), per_device_train_batch_size=8).job().check()
        trainer(tmp_path, **accumulated).job().check()


def weighted_by_hardness(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="none")
    return (losses.softmax(0).detach() * losses).sum() * losses.numel() / num_items_in_batch


def test_a_loss_that_does_not_add_up_is_refused_before_anything_is_launched(tmp_path: Path):
    with pytest.raises(ConfigError, match="weighted_by_hardness must return a sum divided by num_items_in_batch"):
        trainer(tmp_path, compute_loss_func=weighted_by_hardness).job().check()


class Centred(torch.nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden - hidden.mean(0)


def test_a_layer_that_depends_on_its_microbatch_is_refused_before_anything_is_launched(tmp_path: Path):
    changed = model()
    changed.transformer.h[1].ln_2 = Centred()
    job = trainer(tmp_path, model=changed).job()
    with pytest.raises(ConfigError, match=r"transformer\.h\.1\.ln_2 \(Centred\) computes a sample with the others"):
        job.check()
    with pytest.raises(ConfigError, match=r"transformer\.h\.1\.ln_2 \(Centred\) computes a sample with the others"):
        _ = job.settings


class ShorterAndShorter(list[Any]):
    def __getitem__(self, number: Any) -> Any:
        row = super().__getitem__(number)
        self[number] = {name: values[:-1] for name, values in row.items()}
        return row


def test_samples_that_depend_on_what_was_read_before_are_refused_before_anything_is_launched(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"Trainer\(train_dataset=…\): sample 0 is another one when it is read again"):
        trainer(tmp_path, train_dataset=ShorterAndShorter(rows(11))).job().check()
    evaluated = {"eval_dataset": ShorterAndShorter(rows(11)), "eval_strategy": "steps", "eval_steps": 2}
    with pytest.raises(
        ConfigError, match=r"Trainer\(eval_dataset=…\): sample [0-9] is another one when it is read again"
    ):
        trainer(tmp_path, **evaluated).job().check()


def test_a_collator_that_counts_is_refused_before_anything_is_launched(tmp_path: Path):
    made = trainer(tmp_path)
    collate, calls = made.data_collator, iter(range(10_000))

    def counting(batch: list[Any]) -> dict[str, torch.Tensor]:
        return {**collate(batch), "labels": collate(batch)["labels"] + next(calls)}

    made.data_collator = counting
    with pytest.raises(ConfigError, match="data_collator returns other rows when it is called again"):
        made.job().check()


def test_smoothed_labels_add_up(tmp_path: Path):
    trainer(tmp_path, label_smoothing_factor=0.1).job().check()


class Clipping(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 0.5)
        return super().step(closure)


def test_an_optimizer_that_depends_on_the_plan_is_refused_before_anything_is_launched(tmp_path: Path):
    with pytest.raises(ConfigError, match="Clipping updates a parameter differently"):
        trainer(tmp_path, optimizer_cls_and_kwargs=(Clipping, {"lr": 0.3})).job().check()


def test_an_encoder_decoder_is_cut_as_it_was_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, vocab_size=VOCAB_SIZE, decoder_start_token_id=0
    )
    job = trainer(tmp_path, model=transformers.T5ForConditionalGeneration(config)).job()
    assert "num_stages" not in job.settings
    assert job.settings["model"] == {"type": "script", "whole_loss": "labels"}
    assert job.flow is not None
    assert not capsys.readouterr().err


class Single(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(VOCAB_SIZE, VOCAB_SIZE)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: Any = None) -> dict[str, Any]:
        return {"loss": torch.nn.functional.cross_entropy(self.table(input_ids).flatten(0, 1), labels.flatten())}


def test_a_model_that_cannot_be_cut_is_kept_whole_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = trainer(tmp_path, model=Single(), remove_unused_columns=False).job()
    assert job.settings["num_stages"] == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("oobleck: Single is kept whole on each node")
    assert line.endswith(": it has no list of modules that run one after the other")


def test_settings_say_what_the_arguments_say(tmp_path: Path):
    found = settings(
        tmp_path, count=20, per_device_train_batch_size=4, num_train_epochs=3, max_grad_norm=0.5, weight_decay=0.2,
        seed=7, bf16=True, save_strategy="epoch", save_total_limit=2, eval_strategy="steps", eval_steps=4,
        eval_dataset=rows(3), run_name="named", gradient_checkpointing=True,
    )  # fmt: skip
    assert found["tag"] == "named"
    assert found["max_steps"] == 15
    assert found["eval_steps"] == 4
    assert found["checkpoint"] == {"save_steps": 5, "waits_for_disk": True, "save_total_limit": 2}
    assert found["data"] == {"sequence_length": 8, "vocab_size": VOCAB_SIZE}
    assert (found["dtype"], found["seed"], found["recompute"]) == ("bfloat16", 7, "all")
    assert (found["optimizer"]["max_grad_norm"], found["optimizer"]["weight_decay"]) == (0.5, 0.2)


class OnSeveralGPUs(transformers.TrainingArguments):
    """Arguments as transformers makes them on a machine with four GPUs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._n_gpu = 4


@pytest.mark.parametrize("kind", [transformers.TrainingArguments, OnSeveralGPUs])
def test_a_batch_is_that_of_one_gpu_however_many_the_machine_has(tmp_path: Path, kind: type):
    values = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 3}
    given = kind(output_dir=str(tmp_path), report_to=[], use_cpu=True, num_train_epochs=1, **values)
    made = Trainer(model=model(), args=given, data_collator=collate, train_dataset=rows(16), eval_dataset=rows(6))
    job = made.job()
    assert (job.settings["global_batch_size"], job.settings["max_steps"]) == (4, 4)
    assert sorted(number for step in range(1, 5) for number in job.made["order"]()(step)) == list(range(16))
    assert made.get_eval_dataloader().batch_sampler.batch_size == 3


def test_names_and_limits_that_transformers_takes_are_taken(tmp_path: Path):
    with pytest.warns(UserWarning, match=r"run_name='exp/lr 1e-4'\): the run is called exp-lr-1e-4-[0-9a-f]{8}"):
        named = settings(tmp_path, run_name="exp/lr 1e-4", save_total_limit=-1, max_grad_norm=-1.0)
    assert "save_total_limit" not in named["checkpoint"]
    assert named["optimizer"]["max_grad_norm"] == 0.0
    with pytest.warns(UserWarning, match="the run is called"):
        tags = [settings(tmp_path, run_name="a" * 60 + end)["tag"] for end in ("1", "2")]
    assert tags[0] != tags[1]
    for tag in (named["tag"], *tags):
        assert load_job(json.dumps({"tag": tag}), source="job.json").tag == tag


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gradient_accumulation_steps": 0}, r"gradient_accumulation_steps=0\): it must be at least 1"),
        ({"num_train_epochs": 0}, r"num_train_epochs=0\): there would be no step to train"),
        ({"eval_dataset": [], "eval_strategy": "epoch"}, r"Trainer\(eval_dataset=…\): it has no samples; leave it out"),
    ],
)
def test_counts_that_leave_nothing_to_do_are_refused_by_name(tmp_path: Path, values: dict[str, Any], words: str):
    with receiving(lambda reached: reached.job()), pytest.raises(ConfigError, match=words):
        trainer(tmp_path, **values).train()


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        (torch.float32, {}, "float32"),
        (torch.bfloat16, {}, "bfloat16"),
        (torch.float16, {}, "float16"),
        (torch.float64, {}, "float64"),
        (torch.float32, {"bf16": True}, "bfloat16"),
    ],
)
def test_the_precision_is_the_models_unless_the_arguments_say_otherwise(
    tmp_path: Path, dtype: torch.dtype, values: dict[str, Any], expected: str
):
    assert settings(tmp_path, model=model().to(dtype), **values)["dtype"] == expected


def test_mixed_precision_of_float64_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="leave bf16 and fp16 out"):
        settings(tmp_path, model=model().double(), bf16=True)


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup", "polynomial", "inverse_sqrt"])
@pytest.mark.parametrize("warmup", [0, 3, 0.25])
def test_the_rate_of_each_step_is_that_of_transformers(tmp_path: Path, kind: str, warmup: float):
    values = {"lr_scheduler_type": kind, "warmup_steps": warmup, "learning_rate": 0.5, "max_steps": 12}
    theirs = trainer(tmp_path, kind=transformers.Trainer, **values)
    theirs.create_optimizer_and_scheduler(12)
    factor = trainer(tmp_path, **values).job().made["lr_lambda"]
    for step in range(1, 13):
        assert 0.5 * factor(step) == pytest.approx(theirs.lr_scheduler.get_last_lr()[0], abs=1e-15)
        theirs.optimizer.step()
        theirs.lr_scheduler.step()


@pytest.mark.parametrize("adapts", [False, True])
def test_what_transformers_decays_is_decayed(tmp_path: Path, adapts: bool):
    def make() -> Any:
        built = model()
        return peft.get_peft_model(built, peft.LoraConfig(r=2, bias="all", fan_in_fan_out=True)) if adapts else built

    theirs = trainer(tmp_path, kind=transformers.Trainer, model=make(), weight_decay=0.1)
    theirs.create_optimizer()
    own = {id(parameter): name for name, parameter in unwrapped(theirs.model).named_parameters()}
    expected = {own[id(parameter)] for parameter in theirs.optimizer.param_groups[0]["params"]}
    ours = trainer(tmp_path, model=make(), weight_decay=0.1)
    trained = {name for name, parameter in unwrapped(ours.model).named_parameters() if parameter.requires_grad}
    assert ours.job().made["decayed"]() & trained == expected


def test_the_optimizer_is_the_one_that_is_asked_for(tmp_path: Path):
    group = [{"params": [torch.nn.Parameter(torch.zeros(2, 2))], "weight_decay": 0.1}]
    adamw = trainer(tmp_path, adam_beta2=0.9, learning_rate=0.25).job().made["optimizer"](group)
    assert isinstance(adamw, torch.optim.AdamW)
    assert (adamw.defaults["lr"], adamw.defaults["betas"]) == (0.25, (0.9, 0.9))
    given = (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9})
    sgd = trainer(tmp_path, optimizer_cls_and_kwargs=given).job().made["optimizer"](group)
    assert isinstance(sgd, torch.optim.SGD)
    assert (sgd.defaults["lr"], sgd.param_groups[0]["weight_decay"]) == (0.5, 0.1)


@pytest.mark.parametrize("optim", ["galore_adamw", "lomo", "adamw_bnb_8bit"])
def test_an_optimizer_that_wants_more_than_parameters_is_refused(tmp_path: Path, optim: str):
    with pytest.raises(ConfigError, match=f"optim='{optim}'"):
        trainer(tmp_path, optim=optim, optim_target_modules="all-linear").job()


def test_a_label_smoother_that_the_script_sets_or_removes_is_the_one_that_trains(tmp_path: Path):
    outputs, labels = model()(torch.arange(3, 9)[None]), torch.arange(3, 9)[None]
    made = trainer(tmp_path)
    assert "compute_loss" not in made.job().made
    made.label_smoother = LabelSmoother(epsilon=0.3)
    made.args.label_smoothing_factor = 0.1  # transformers reads it when the trainer is made
    expected = LabelSmoother(epsilon=0.3)(outputs, labels, shift_labels=True, num_items_in_batch=6)
    assert torch.equal(made.job().made["compute_loss"](outputs, labels, num_items_in_batch=6), expected)
    smoothed = trainer(tmp_path, label_smoothing_factor=0.1)
    smoothed.label_smoother = None
    assert "compute_loss" not in smoothed.job().made


def test_means_that_a_script_asks_for_are_said_to_be_weighed_otherwise(tmp_path: Path):
    made = trainer(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    made.model_accepts_loss_kwargs = False
    with pytest.warns(UserWarning, match="transformers averages those of gradient_accumulation_steps=2"):
        made.job().check()


def test_special_tokens_are_those_of_the_tokenizer_as_in_transformers(tmp_path: Path):
    inner = Tokenizer(WordLevel({"<pad>": 0, "<end>": 7, "<unk>": 2}, unk_token="<unk>"))
    made = trainer(tmp_path)
    made.processing_class = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<end>", eos_token="<end>")
    assert made.model.config.pad_token_id == 0
    made.job()
    assert (made.model.config.pad_token_id, made.model.config.eos_token_id) == (7, 7)


def test_smoothed_labels_have_transformers_loss(tmp_path: Path):
    outputs = {"logits": torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(1))}
    labels = torch.tensor([[1, 2, -100, 4, 5], [6, 7, 8, -100, 1]])
    ours = trainer(tmp_path, label_smoothing_factor=0.1).job().made["compute_loss"]
    expected = LabelSmoother(epsilon=0.1)(outputs, labels, shift_labels=True, num_items_in_batch=6)
    assert torch.equal(ours(outputs, labels, num_items_in_batch=torch.tensor(6)), expected)


def test_the_model_is_the_one_that_is_initialized(tmp_path: Path):
    made = trainer(tmp_path, model_init=lambda: model())
    assert made.job().made["live_model"]() is made.model


def test_the_longest_row_is_what_the_collator_makes_of_the_longest_sample(tmp_path: Path):
    made = trainer(tmp_path, count=8)
    assert longest_row(made.get_train_dataloader()) == 8
    padded = trainer(tmp_path, count=8)
    padded.data_collator = lambda batch: {"input_ids": torch.zeros(len(batch), 16, dtype=torch.int64)}
    assert longest_row(padded.get_train_dataloader()) == 16
    padded.data_collator = lambda batch: {"pixels": torch.zeros(len(batch), 16)}
    with pytest.raises(ConfigError, match="returns no input_ids; it returns pixels"):
        longest_row(padded.get_train_dataloader())


def test_a_dataset_of_datasets_gives_its_lengths_by_its_column(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    made = trainer(tmp_path, train_dataset=datasets.Dataset.from_list([{**row, "text": "x"} for row in rows(9)]))
    loader = made.get_train_dataloader()
    assert "text" not in loader.dataset.column_names, "as transformers removes it"
    assert longest_row(loader) == 8


def test_too_few_samples_for_a_batch_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="3 samples are no batch of 8"):
        trainer(tmp_path, count=3, per_device_train_batch_size=8, dataloader_drop_last=True).job()


def test_a_model_that_cannot_be_trained_as_it_is_is_refused_before_anything_is_launched(
    tmp_path: Path,
):
    made = model()
    job = trainer(tmp_path, model=made).job()
    made.lm_head.weight.register_hook(torch.sign)
    words = r"hook on (transformer\.wte|lm_head)\.weight"
    began_s = time.monotonic()
    with pytest.raises(ConfigError, match=words):
        job.check()
    with pytest.raises(ConfigError, match=words):
        job.settings  # noqa: B018  it is computed where it is asked for
    assert time.monotonic() - began_s < 5.0, "no run was started"
