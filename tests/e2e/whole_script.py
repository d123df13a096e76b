"""A script whose model computes its own loss: `whole_script.py CASE OUTPUT`. What came of it is written to OUTPUT."""

import argparse
import json
import time
from pathlib import Path

import torch
import transformers as hf
from torch import nn
from torch.utils.data import DataLoader

from oobleck.transformers import Trainer

NUM_SAMPLES, BATCH_SIZE, ACCUMULATION, MAX_STEPS = 30, 4, 2, 8
PAUSE_S = 0.0
VOCAB, PAD = 64, 0
PADDED = {"input_ids": PAD, "labels": -100, "token_type_ids": 0, "mm_token_type_ids": 0}
IMAGE, BEFORE, AFTER = 63, 61, 60
"""Tokens of an image, and around it."""
ARGUMENTS = {
    "run_name": "whole",
    "per_device_train_batch_size": BATCH_SIZE,
    "gradient_accumulation_steps": ACCUMULATION,
    "max_steps": MAX_STEPS,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "linear",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "remove_unused_columns": False,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "per_device_eval_batch_size": 2,
    "disable_tqdm": True,
}
TINY = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}
BERT = {
    **TINY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
LLAMA = {
    **TINY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
T5 = {
    "vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    **TINY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 64,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "decoder_start_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


def tokens(number, count):
    return [3 + (7 * number + 5 * place + number * place) % (VOCAB - 4) for place in range(count)]


def padded(rows, name, value):
    longest = max(len(row[name]) for row in rows)
    return torch.tensor([[*row[name], *[value] * (longest - len(row[name]))] for row in rows])


def pad_left(rows):
    """Pads at the beginning of rows, where it shifts positions."""
    batch = {name: padded([{name: row[name][::-1]} for row in rows], name, PADDED[name]).flip(1) for name in rows[0]}
    return {**batch, "attention_mask": (batch["input_ids"] != PAD).long()}


def collate(rows):
    """Pads what has lengths, and stacks the rest."""
    batch = {}
    for name in rows[0]:
        if name in PADDED and isinstance(rows[0][name], list):
            batch[name] = padded(rows, name, PADDED[name])
        elif name == "patches":  # of all images of the batch, however many a sample has
            batch["pixel_values"] = torch.cat([row[name] for row in rows])
        else:
            batch[name] = torch.stack([torch.as_tensor(row[name]) for row in rows])
    if "input_ids" in batch and batch["input_ids"].ndim == 2:
        batch["attention_mask"] = (batch["input_ids"] != PAD).long()
    return batch


def drawn(number, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def text(**labels):
    """Rows of some lengths, with labels by functions of a row's number."""
    return [
        {"input_ids": tokens(n, 4 + n % 5), **{name: make(n) for name, make in labels.items()}}
        for n in range(NUM_SAMPLES)
    ]


class Own(nn.Module):
    """A module of the script, which returns its loss alone."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.outer = nn.Linear(8, 1)

    def forward(self, features, wanted):
        loss = (self.outer(self.inner(features).tanh()).squeeze(-1) - wanted).square().mean()
        return {"loss": loss}


class Single(nn.Module):
    """One module, which cannot be cut."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 1)

    def forward(self, features, labels):
        logits = self.inner(features).squeeze(-1)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


class Recurrent(nn.Module):
    """Torch's own recurrent modules, one after the other."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8)
        self.long = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.gated = nn.GRU(8, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, input_ids, attention_mask, labels):
        hidden, _ = self.long(self.embedding(input_ids))
        hidden, _ = self.gated(hidden)
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        logits = self.head((hidden * weights).sum(1) / weights.sum(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Weighted(Trainer):
    """Weighs labels by their frequency in the text, as many subclasses do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weight = torch.linspace(0.5, 2.0, 3, dtype=outputs.logits.dtype)
        loss = nn.functional.cross_entropy(outputs.logits, labels, weight=weight, reduction="none").mean()
        loss = loss * (1 + 0.1 * self.state.global_step)
        return (loss, outputs) if return_outputs else loss


class Through(Trainer):
    """Overrides compute_loss to no effect."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class Loading(Trainer):
    """Makes a loader of its own, with a generator that goes on from epoch to epoch."""

    def get_train_dataloader(self):
        generator = torch.Generator().manual_seed(11)
        return DataLoader(
            self.train_dataset, batch_size=3, shuffle=True, generator=generator, collate_fn=self.data_collator
        )


class Contrastive(Trainer):
    """A loss of the samples of a batch together."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs.pop("labels")
        vectors = nn.functional.normalize(model(**inputs).logits, dim=-1)
        others = nn.functional.normalize(self.model(**inputs).logits * 1.5 + 0.1, dim=-1)
        loss = nn.functional.cross_entropy(vectors @ others.T * 5, torch.arange(len(vectors)))
        return (loss, vectors) if return_outputs else loss


def bert(kind, **config):
    return kind(hf.BertConfig(**BERT, **config))


def llava():
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**LLAMA), vision_config=hf.CLIPVisionConfig(**VISION), image_token_index=63,
        vision_feature_layer=-1, vision_feature_select_strategy="default",
    )  # fmt: skip
    return hf.LlavaForConditionalGeneration(config)


def llava_rows():
    rows = []
    for number in range(NUM_SAMPLES):
        own = [1, *[63] * 4, *tokens(number, 3 + number % 4)]
        rows.append({"input_ids": own, "labels": [-100] * 5 + own[5:], "pixel_values": drawn(number, 3, 16, 16)})
    return rows


def beside_images(types, **makers):
    """Rows of an image of four tokens and some text, with the tokens' types under a name."""
    rows = []
    for number in range(NUM_SAMPLES):
        words = [3 + token % 50 for token in tokens(number, 3 + number % 4)]
        row = {"input_ids": [1, BEFORE, *[IMAGE] * 4, AFTER, *words], "labels": [-100] * 7 + words}
        kinds = {types: [int(token == IMAGE) for token in row["input_ids"]]}
        rows.append({**row, **kinds, **{name: make(number) for name, make in makers.items()}})
    return rows


def qwen2_vl():
    config = hf.Qwen2VLConfig(
        text_config={**LLAMA, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        vision_config={
            "depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        image_token_id=IMAGE, video_token_id=62, vision_start_token_id=BEFORE, vision_end_token_id=AFTER,
    )  # fmt: skip
    return hf.Qwen2VLForConditionalGeneration(config)


def gemma3():
    config = hf.Gemma3Config(
        text_config={
            **LLAMA, "head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
        },
        vision_config={**VISION, "patch_size": 4}, mm_tokens_per_image=4, image_token_index=IMAGE,
        boi_token_index=BEFORE, eoi_token_index=AFTER,
    )  # fmt: skip
    return hf.Gemma3ForConditionalGeneration(config)


def choices(number):
    return torch.tensor([tokens(number + choice, 6) for choice in range(3)])


def wav2vec2():
    config = hf.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=12,
        conv_dim=(8, 8), conv_stride=(4, 4), conv_kernel=(8, 4), num_feat_extract_layers=2, feat_extract_norm="layer",
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0,
        feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, activation_dropout=0.0, apply_spec_augment=False,
        ctc_loss_reduction="mean", pad_token_id=0, do_stable_layer_norm=True,
    )  # fmt: skip
    return hf.Wav2Vec2ForCTC(config)


def whisper():
    config = hf.WhisperConfig(**{**BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32})
    return hf.WhisperForConditionalGeneration(config)


def gpt2():
    config = hf.GPT2Config(
        **TINY, n_embd=16, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return hf.GPT2LMHeadModel(config)


def adapted(kind, base=None, **values):
    """A model, or else a Llama, with PEFT's adapters of some kind."""
    import peft

    model = base or hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA))
    torch.manual_seed(6)
    return peft.get_peft_model(model, getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **values))


def rows_of(**makers):
    return [{name: make(n) for name, make in makers.items()} for n in range(NUM_SAMPLES)]


def labels_of(n):
    # Two rows have as many labels as the next two: transformers' loss of an evaluation is the mean of its batches'
    # means, ours that over all labels.
    return tokens(n + 1, (3, 6, 4, 5)[n % 4])


def words():
    return [{"input_ids": labels_of(n), "labels": labels_of(n)} for n in range(NUM_SAMPLES)]


CASES = {
    "t5": (
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
        lambda: text(labels=labels_of),
    ),
    "bart": (lambda: hf.BartForConditionalGeneration(hf.BartConfig(**BART)), lambda: text(labels=labels_of)),
    "whisper": (whisper, lambda: rows_of(input_features=lambda n: drawn(n, 8, 32), labels=labels_of)),
    "vit": (
        lambda: hf.ViTForImageClassification(
            hf.ViTConfig(**VISION, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        ),
        lambda: rows_of(pixel_values=lambda n: drawn(n, 3, 16, 16), labels=lambda n: n % 3),
    ),
    "wav2vec2": (
        wav2vec2,
        lambda: rows_of(
            input_values=lambda n: drawn(n, 512), labels=lambda n: [1 + (n + place) % 11 for place in range(2 + n % 3)]
        ),
    ),
    "llava": (llava, llava_rows),
    "qwen2_vl": (
        qwen2_vl,
        lambda: beside_images(
            "mm_token_type_ids",
            patches=lambda n: drawn(n, 16, 96),
            image_grid_thw=lambda n: torch.tensor([1, 4, 4]),
        ),
    ),
    "gemma3": (gemma3, lambda: beside_images("token_type_ids", pixel_values=lambda n: drawn(n, 3, 16, 16))),
    "regression": (
        lambda: bert(hf.BertForSequenceClassification, num_labels=1),
        lambda: text(labels=lambda n: n / 10),
    ),
    "multilabel": (
        lambda: bert(hf.BertForSequenceClassification, num_labels=3, problem_type="multi_label_classification"),
        lambda: text(labels=lambda n: torch.tensor([float(n % 2), float(n % 3 == 0), 1.0])),
    ),
    "qa": (
        lambda: bert(hf.BertForQuestionAnswering),
        lambda: rows_of(
            input_ids=lambda n: torch.tensor(tokens(n, 6)), start_positions=lambda n: n % 4, end_positions=lambda n: 4
        ),
    ),
    # Its loss is over the tokens of padding too, of which a batch has more than its parts.
    "ragged_qa": (
        lambda: bert(hf.BertForQuestionAnswering),
        lambda: text(start_positions=lambda n: n % 4, end_positions=lambda n: (n + 1) % 4),
    ),
    "choice": (
        lambda: bert(hf.BertForMultipleChoice),
        lambda: rows_of(input_ids=choices, labels=lambda n: n % 3),
    ),
    "reward": (
        lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**LLAMA, num_labels=1)),
        lambda: text(labels=lambda n: n / 10),
    ),
    "llama": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)),
        words,
        Through,
    ),
    # A chain of blocks with a loss that is known. The last batch that is evaluated has no labels that count.
    "chain": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)),
        lambda: [*words()[:-1], {**words()[-1], "labels": [-100] * len(labels_of(NUM_SAMPLES - 1))}],
    ),
    "loads": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)), words, Loading),
    "ia3": (lambda: adapted("IA3", feedforward_modules=["down_proj"], target_modules=["k_proj", "down_proj"]), words),
    "dora": (lambda: adapted("Lora", r=2, use_dora=True, init_lora_weights="gaussian"), words),
    "vera": (lambda: adapted("Vera", r=4, target_modules=["q_proj", "v_proj"]), words),
    "tied_head": (lambda: adapted("Lora", gpt2(), r=2, fan_in_fan_out=True, modules_to_save=["lm_head"]), words),
    "pads_left": (gpt2, words),
    "flattens": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)), words),
    "trainable tokens": (lambda: adapted("TrainableTokens", token_indices=[3, 5, 7]), words),
    "prompt": (lambda: adapted("PromptTuning", num_virtual_tokens=3), words),
    "prefix": (lambda: adapted("PrefixTuning", num_virtual_tokens=3), words),
    "adalora": (
        lambda: adapted("AdaLora", init_r=3, target_r=2, total_step=20, tinit=2, tfinal=2, target_modules=["q_proj"]),
        words,
    ),
    "single": (Single, lambda: rows_of(features=lambda n: drawn(n, 6), labels=lambda n: float(n % 5))),
    "module": (Own, lambda: rows_of(features=lambda n: drawn(n, 6), wanted=lambda n: float(n % 5))),
    "recurrent": (Recurrent, lambda: text(labels=lambda n: n % 3)),
    "weighted": (
        lambda: bert(hf.BertForSequenceClassification, num_labels=3),
        lambda: text(labels=lambda n: n % 3),
        Weighted,
    ),
    "contrastive": (
        lambda: bert(hf.BertForSequenceClassification, num_labels=3),
        lambda: text(labels=lambda n: n % 3),
        Contrastive,
    ),
}
COLLATORS = {"pads_left": pad_left, "flattens": hf.DataCollatorWithFlattening()}
"""Where it is not `collate`."""


def measured(predicted):
    """What evaluations say of all predictions, in their order."""
    logits = torch.as_tensor(predicted.predictions).double().reshape(len(predicted.predictions), -1)
    return {"weighted": float(logits.mean(1) @ torch.arange(1.0, len(logits) + 1).double())}


def make_trainer(case, output, *, pause_s=PAUSE_S, metrics=False, **arguments):
    """Arguments are those of TrainingArguments, in place of the script's own."""
    make_model, make_rows, *kind = CASES[case]
    torch.manual_seed(5)
    model = make_model()
    if pause_s:
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        inner.register_forward_pre_hook(lambda *_: time.sleep(pause_s))
    rows = make_rows()
    return (*kind, Trainer)[0](
        model=model,
        args=hf.TrainingArguments(**{**ARGUMENTS, "output_dir": str(Path(output).with_suffix("")), **arguments}),
        train_dataset=rows[:-4],
        eval_dataset=rows[-4:],
        data_collator=COLLATORS.get(case, collate),
        compute_metrics=measured if metrics else None,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("output")
    parser.add_argument("--pause", type=float, default=PAUSE_S)
    parser.add_argument("--metrics", action="store_true")
    parsed = parser.parse_args()
    trainer = make_trainer(parsed.case, parsed.output, pause_s=parsed.pause, metrics=parsed.metrics)
    trainer.train()
    write(trainer, parsed.output)


def write(trainer, output):
    """Write what has come of training."""
    log = trainer.state.log_history
    found = {
        "losses": [entry["loss"] for entry in log if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in log if "loss" in entry],
        "evaluations": [entry["eval_loss"] for entry in log if "eval_loss" in entry],
        "metrics": [entry["eval_weighted"] for entry in log if "eval_weighted" in entry],
        "weights": sum(float(each.detach().double().square().sum()) for each in trainer.model.parameters()),
    }
    with Path(output).open("a") as file:
        file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
