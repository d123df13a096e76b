"""The features of a Trainer that scripts use: each is taken before a run starts, or refused by name with its reason.

What transformers' own Trainer refuses here, for want of a package or of a network, is not among them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers.trainer_callback import EarlyStoppingCallback

from oobleck.errors import ConfigError
from oobleck.transformers import Trainer
from oobleck.transformers.checks import check_trainer, default_arguments

from .trainers import VOCAB_SIZE, arguments, collate, model, rows, trainer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ENCODER = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "vocab_size": VOCAB_SIZE, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
LLAMA = {**ENCODER, "num_key_value_heads": 2}
EVALUATED = {"eval_dataset": rows(4), "eval_strategy": "steps", "eval_steps": 2}
BEST = {**EVALUATED, "load_best_model_at_end": True, "metric_for_best_model": "loss", "save_steps": 2}


def overriding(name: str) -> type[Trainer]:
    """A subclass that overrides a method and calls what it overrides."""

    def override(self: Trainer, *args: Any, **named: Any) -> Any:
        return getattr(super(kind, self), name)(*args, **named)

    kind: type[Trainer] = type("Mine", (Trainer,), {name: override})
    return kind


class OwnLoss(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


class OwnOptimizer(Trainer):
    def create_optimizer(self, *args: Any) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-2)
        return self.optimizer


class OwnSchedule(Trainer):
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer or self.optimizer)
        return self.lr_scheduler


class InTurn(Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([{"input_ids": [5 + n] * 8, "labels": [5 + n] * 8} for n in range(16)])


class Tensors(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> Any:
        return {"input_ids": torch.tensor([5 + number] * 8), "labels": torch.tensor([5 + number] * 8)}


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        found = self.inner(input_ids.float())
        assert labels is not None
        return {"loss": (found - labels.float()).square().mean(), "logits": found}


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss function as transformers documents it."""
    how = "mean" if num_items_in_batch is None else "sum"
    loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=how)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def tokenizer(**values: Any) -> hf.PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCAB_SIZE)}, unk_token="w0"))
    special = {"pad_token": "w0", "eos_token": "w2", "unk_token": "w0", "mask_token": "w4"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=words, **special, **values)


def with_optimizer(directory: Path) -> Any:
    trained = model()
    return trainer(directory, model=trained, optimizers=(torch.optim.AdamW(trained.parameters(), 1e-3), None))


def changed(change: Callable[[Any], Any]) -> Callable[[], Any]:
    def make() -> Any:
        made = model()
        change(made)
        return made

    return make


def of(make: Callable[[], Any], data: Any, collator: Any = None) -> Callable[[Path], Any]:
    """Make a trainer of a model with its own rows."""

    def of_directory(directory: Path) -> Any:
        return Trainer(
            model=make(), args=arguments(directory), train_dataset=data,
            data_collator=collator or hf.default_data_collator,
        )  # fmt: skip

    return of_directory


def flat(**labels: Callable[[int], Any]) -> list[dict[str, Any]]:
    """Rows of eight tokens, with labels by functions of a row's number."""
    own = [{"input_ids": [5 + n] * 8, "attention_mask": [1] * 8} for n in range(16)]
    return [{**row, **{name: make(n) for name, make in labels.items()}} for n, row in enumerate(own)]


def adapted(config: Any, base: Callable[[], Any] = model) -> Callable[[], Any]:
    return lambda: peft.get_peft_model(base(), config)


def lora(**values: Any) -> Callable[[], Any]:
    return adapted(peft.LoraConfig(r=2, task_type="CAUSAL_LM", **values))


def llama(kind: Any = hf.LlamaForCausalLM, **values: Any) -> Callable[[], Any]:
    return lambda: kind(hf.LlamaConfig(**{**LLAMA, **values}))


def encoder(kind: Any, config: Any = hf.BertConfig, **values: Any) -> Callable[[], Any]:
    return lambda: kind(config(**{**ENCODER, **values}))


WORDS = flat(labels=lambda n: [5 + n] * 8)
CLASSES, KINDS = flat(labels=lambda n: n % 3), flat(labels=lambda n: [n % 3] * 8)
PAIRS = [{"input_ids": [[5 + n] * 8] * 2, "attention_mask": [[1] * 8] * 2, "labels": n % 2} for n in range(16)]
IMAGES = [{"pixel_values": torch.full((3, 16, 16), n / 16.0), "labels": n % 3} for n in range(16)]
TEXTS = datasets.Dataset.from_list([{**row, "text": "words"} for row in WORDS])
T5 = {
    "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": VOCAB_SIZE,
    "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
BART = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
VIT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 16,
    "patch_size": 8, "num_labels": 3,
}  # fmt: skip
DEBERTA = {
    "relative_attention": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
}  # fmt: skip
DISTILBERT = {
    "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "vocab_size": VOCAB_SIZE, "num_labels": 3,
    "max_position_embeddings": 64,
}  # fmt: skip
ADALORA = {"task_type": "CAUSAL_LM", "total_step": 10, "init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 1}
VIRTUAL = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 2}

ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "load_best_model_at_end": BEST,
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "label_smoothing": {"label_smoothing_factor": 0.1},
    "neftune": {"neftune_noise_alpha": 5},
    "bf16": {"bf16": True},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "save best": {**EVALUATED, "save_strategy": "best", "metric_for_best_model": "loss"},
    "save_only_model": {"save_only_model": True},
    "torch_compile": {"torch_compile": True},
    "a mode of compilation": {"torch_compile": True, "torch_compile_mode": "reduce-overhead"},
    "split_batches": {"accelerator_config": {"split_batches": True}},
    "tokens seen": {"include_num_input_tokens_seen": "all"},
    "states of callbacks": {"restore_callback_states_from_checkpoint": True},
    "full_determinism": {"full_determinism": False},
    "dataloader_num_workers": {"dataloader_num_workers": 2},
    "eval_delay": {**EVALUATED, "eval_delay": 1},
    "eval_on_start": {**EVALUATED, "eval_on_start": True},
    "no clipping": {"max_grad_norm": 0},
    "ddp_find_unused_parameters": {"ddp_find_unused_parameters": True},
    "seeds": {"seed": 3, "data_seed": 4},
    "drop_last": {"dataloader_drop_last": True},
    "half an epoch": {"num_train_epochs": 1.5},
    **{f"optim {name}": {"optim": name} for name in ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")},
    **{
        f"schedule {name}": {"lr_scheduler_type": name, "lr_scheduler_kwargs": options, "warmup_steps": 1}
        for name, options in (
            ("cosine_with_min_lr", {"min_lr": 1e-5}),
            ("cosine_warmup_with_min_lr", {"min_lr": 1e-5}),
            ("warmup_stable_decay", {"num_decay_steps": 2}),
        )
    },
    "optimizer_cls_and_kwargs": {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 1e-3})},
    "compute_loss overridden": {"kind": OwnLoss},
    "create_optimizer overridden": {"kind": OwnOptimizer},
    "create_scheduler overridden": {"kind": OwnSchedule},
    "_get_train_sampler overridden": {"kind": InTurn},
    "_prepare_inputs overridden": {"kind": overriding("_prepare_inputs")},
    "get_train_dataloader overridden": {"kind": overriding("get_train_dataloader")},
    "training_step overridden": {"kind": overriding("training_step")},
    "compute_loss_func": {"compute_loss_func": summed},
    "a stream": {"train_dataset": Stream(), "max_steps": 4},
    "two datasets to evaluate": {**EVALUATED, "eval_dataset": {"one": rows(4), "two": rows(4)}},
    "early stopping": {**BEST, "callbacks": [EarlyStoppingCallback(2)]},
    "compute_metrics": {**EVALUATED, "compute_metrics": lambda predicted: {"one": 1.0}},
    "preprocess_logits_for_metrics": {
        **EVALUATED,
        "compute_metrics": lambda predicted: {"one": 1.0},
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
    },
    "model_init": {"model_init": lambda: model()},
}
MODELS: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    "collator of Seq2Seq": (model, rows(16), hf.DataCollatorForSeq2Seq(tokenizer())),
    "collator of language models": (
        model,
        [{"input_ids": row["input_ids"]} for row in rows(16)],
        hf.DataCollatorForLanguageModeling(tokenizer(), mlm=False),
    ),
    "collator that flattens": (llama(), rows(16), hf.DataCollatorWithFlattening()),
    "collator that pads left": (model, rows(16), hf.DataCollatorForSeq2Seq(tokenizer(padding_side="left"))),
    "an adapter of a tied head": (lora(modules_to_save=["lm_head"]), rows(16), collate),
    "default collator": (model, [{"input_ids": [5 + n] * 8, "labels": [5 + n] * 8} for n in range(16)], None),
    "rows of tensors": (model, Tensors(), None),
    "a column of text": (model, TEXTS, None),
    "a column of masks": (model, WORDS, None),
    "lora": (lora(), rows(16), collate),
    "lora all-linear": (lora(target_modules="all-linear"), rows(16), collate),
    "dora": (lora(use_dora=True), rows(16), collate),
    "rslora": (lora(use_rslora=True), rows(16), collate),
    "lora modules_to_save": (
        adapted(peft.LoraConfig(r=2, task_type="CAUSAL_LM", modules_to_save=["lm_head"]), llama()),
        rows(16),
        collate,
    ),
    "lora trainable_token_indices": (lora(trainable_token_indices=[1, 2]), rows(16), collate),
    "lora bias": (lora(bias="lora_only"), rows(16), collate),
    "lora layers_to_transform": (lora(layers_to_transform=[1]), rows(16), collate),
    "lora pissa": (lora(init_lora_weights="pissa"), rows(16), collate),
    "adalora": (adapted(peft.AdaLoraConfig(**ADALORA)), rows(16), collate),
    "ia3": (adapted(peft.IA3Config(task_type="CAUSAL_LM")), rows(16), collate),
    "prompt tuning": (adapted(peft.PromptTuningConfig(**VIRTUAL)), rows(16), collate),
    "prefix tuning": (adapted(peft.PrefixTuningConfig(**VIRTUAL)), rows(16), collate),
    "p-tuning": (adapted(peft.PromptEncoderConfig(**VIRTUAL, encoder_hidden_size=8)), rows(16), collate),
    "loha": (adapted(peft.LoHaConfig(target_modules=["q_proj"], r=2), llama()), rows(16), collate),
    "lokr": (adapted(peft.LoKrConfig(target_modules=["q_proj"], r=2), llama()), rows(16), collate),
    "oft": (adapted(peft.OFTConfig(target_modules=["q_proj"], r=0, oft_block_size=4), llama()), rows(16), collate),
    "vera": (adapted(peft.VeraConfig(task_type="CAUSAL_LM", target_modules=["c_proj"])), rows(16), collate),
    "norms alone": (adapted(peft.LNTuningConfig(task_type="CAUSAL_LM")), rows(16), collate),
    "frozen layers": (changed(lambda made: made.transformer.h[0].requires_grad_(False)), rows(16), collate),
    "resized embeddings": (changed(lambda made: made.resize_token_embeddings(VOCAB_SIZE + 8)), rows(16), collate),
    "questions": (
        encoder(hf.BertForQuestionAnswering),
        flat(start_positions=lambda n: 1, end_positions=lambda n: 2),
        None,
    ),
    "choices": (encoder(hf.BertForMultipleChoice), PAIRS, None),
    "classes": (encoder(hf.BertForSequenceClassification, num_labels=3), CLASSES, None),
    "regression": (encoder(hf.BertForSequenceClassification, num_labels=1), flat(labels=lambda n: n / 3), None),
    "several labels": (
        encoder(hf.BertForSequenceClassification, num_labels=3, problem_type="multi_label_classification"),
        flat(labels=lambda n: [1.0, 0.0, float(n % 2)]),
        None,
    ),
    "classes of tokens": (encoder(hf.BertForTokenClassification, num_labels=3), KINDS, None),
    "pretraining": (
        encoder(hf.BertForPreTraining),
        flat(labels=lambda n: [5 + n] * 8, next_sentence_label=lambda n: n % 2),
        None,
    ),
    "next sentence": (encoder(hf.BertForNextSentencePrediction), flat(labels=lambda n: n % 2), None),
    "masked words": (encoder(hf.BertForMaskedLM), WORDS, None),
    "distilbert": (lambda: hf.DistilBertForSequenceClassification(hf.DistilBertConfig(**DISTILBERT)), CLASSES, None),
    "roberta": (encoder(hf.RobertaForMaskedLM, hf.RobertaConfig, pad_token_id=1), WORDS, None),
    "albert": (encoder(hf.AlbertForMaskedLM, hf.AlbertConfig, embedding_size=16), WORDS, None),
    "electra": (
        encoder(hf.ElectraForPreTraining, hf.ElectraConfig, embedding_size=16),
        flat(labels=lambda n: [n % 2] * 8),
        None,
    ),
    "deberta": (encoder(hf.DebertaV2ForSequenceClassification, hf.DebertaV2Config, num_labels=3), CLASSES, None),
    "deberta of version 3": (encoder(hf.DebertaV2ForMaskedLM, hf.DebertaV2Config, **DEBERTA), WORDS, None),
    "modernbert": (encoder(hf.ModernBertForMaskedLM, hf.ModernBertConfig), WORDS, None),
    "xlm-roberta": (
        encoder(hf.XLMRobertaForTokenClassification, hf.XLMRobertaConfig, pad_token_id=1, num_labels=3),
        KINDS,
        None,
    ),
    "t5": (lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)), WORDS, None),
    "bart": (lambda: hf.BartForConditionalGeneration(hf.BartConfig(**BART)), WORDS, None),
    "vit": (lambda: hf.ViTForImageClassification(hf.ViTConfig(**VIT)), IMAGES, None),
    "llama that classifies": (llama(hf.LlamaForSequenceClassification, num_labels=3), CLASSES, None),
    "a reward": (llama(hf.LlamaForSequenceClassification, num_labels=1), flat(labels=lambda n: n / 3), None),
    "a router's loss": (
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**LLAMA, num_local_experts=2, output_router_logits=True)),
        WORDS,
        None,
    ),
    "a module": (Own, WORDS, None),
    "half precision": (lambda: llama()().half(), WORDS, None),
    "one block": (llama(num_hidden_layers=1), WORDS, None),
}
TAKEN: dict[str, Callable[[Path], Any]] = {
    **{name: partial(trainer, count=16, **values) for name, values in ARGUMENTS.items()},
    **{name: of(*parts) for name, parts in MODELS.items()},
    "optimizers": with_optimizer,
}
REFUSED_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "auto_find_batch_size": ({"auto_find_batch_size": True}, "set per_device_train_batch_size"),
    "optim adafactor": ({"optim": "adafactor"}, "Choose another, as adamw or sgd"),
    "ignore_data_skip": ({"ignore_data_skip": True}, "the samples of a step follow from its number"),
    "a schedule by losses": ({"lr_scheduler_type": "greedy", **EVALUATED}, "choose "),
    "a plateau": ({"lr_scheduler_type": "reduce_lr_on_plateau", **EVALUATED}, "choose "),
    "_maybe_log_save_evaluate": ({"kind": overriding("_maybe_log_save_evaluate")}, "act in a callback"),
    "_save_checkpoint": ({"kind": overriding("_save_checkpoint")}, "act in a callback's on_save"),
}
REFUSED_MODELS: dict[str, tuple[Callable[[], Any], Any, Any, str]] = {
    "llama that classifies, without a padding token": (
        llama(hf.LlamaForSequenceClassification, num_labels=3, pad_token_id=None),
        CLASSES,
        None,
        "pad_token_id: set it",
    ),
}
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    **{name: (partial(trainer, count=16, **values), words) for name, (values, words) in REFUSED_ARGUMENTS.items()},
    **{name: (of(*parts), words) for name, (*parts, words) in REFUSED_MODELS.items()},
}


@pytest.mark.parametrize("name", TAKEN)
def test_it_is_taken(name: str, tmp_path: Path) -> None:
    prepare(TAKEN[name](tmp_path))


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        prepare(make(tmp_path))


def prepare(made: Any) -> None:
    """What `train()` does before a run starts."""
    made.job().check()
    check_trainer(made, default_arguments(made.args))  # at last: it sets up devices anew
