"""A script of transformers' Trainer: `trainer_script.py CASE FAMILY OUTPUT`, `--save-steps N`, `--resume PATH|newest`.

Cases are those of `finetuning_job`: `padded`, `lora`, `packed`, `labels`, and `plain`, with padding at the end alone.
What came of it is written to OUTPUT, by the lines after `train()`, which run once.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from finetuning_job import LENGTH, LORA, NUM_LABELS, PAD, VOCAB_SIZE, samples
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_callback import ExportableState

from oobleck.transformers import Trainer

NUM_SAMPLES, NUM_KEPT = 45, 16
BATCHES = {"labels": (16, 1)}
"""Samples of a batch, and batches of a step, where these are not (4, 4)."""
PAUSE_S = 0.05
"""Of each forward pass, so that the steps leave time to kill nodes."""
TOKENS = {"vocab_size": VOCAB_SIZE, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2, "num_labels": NUM_LABELS}
CONFIGS = {
    "gpt2": GPT2Config(
        n_embd=32, n_layer=4, n_head=2, n_positions=LENGTH, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **TOKENS
    ),
    "llama": LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=LENGTH, **TOKENS,
    ),
}  # fmt: skip


class Counting(TrainerCallback, ExportableState):
    """Counts steps, over all runs that continue from a checkpoint."""

    def __init__(self):
        self.num_steps = 0

    def on_step_end(self, args, state, control, **details):
        self.num_steps += 1

    def state(self):
        return {"args": {}, "attributes": {"num_steps": self.num_steps}}


class Noting(TrainerCallback):
    """Notes what happens, in the script's own memory."""

    def __init__(self):
        self.steps = []
        self.recoveries = []

    def on_step_end(self, args, state, control, model=None, **details):
        assert model is not None
        self.steps.append((state.global_step, state.epoch))

    def on_recovery(self, args, state, control, text="", **details):
        self.recoveries.append(text)


def collate(rows):
    """Pad to the longest of a batch."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(row, name, value):
        found = row.get(name)
        values = torch.ones(len(row["input_ids"]), dtype=torch.int64) if found is None else torch.as_tensor(found)
        return torch.nn.functional.pad(values, (0, longest - len(values)), value=value)

    batch = {name: torch.stack([padded(row, name, pad) for row in rows]) for name, pad in (("input_ids", PAD),)}
    batch["attention_mask"] = torch.stack([padded(row, "attention_mask", 0) for row in rows])
    if "label" in rows[0]:
        return {**batch, "labels": torch.tensor([row["label"] for row in rows])}
    return {**batch, "labels": torch.stack([padded(row, "labels", -100) for row in rows])}


def make_model(case, family):
    torch.manual_seed(3)
    auto = AutoModelForSequenceClassification if case == "labels" else AutoModelForCausalLM
    model = auto.from_config(CONFIGS[family])
    if case == "lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    model.get_input_embeddings().register_forward_hook(lambda *_: time.sleep(PAUSE_S))
    return model.double()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs=3)
    parser.add_argument("--save-steps", type=int)
    parser.add_argument("--resume")
    parsed = parser.parse_args()
    case, family, output = parsed.words
    batch_size, accumulation = BATCHES.get(case, (4, 4))
    everything = samples(case)
    noting = Noting()
    trainer = Trainer(
        model=make_model(case, family),
        args=TrainingArguments(
            output_dir=str(Path(output).with_suffix("")),
            run_name="e2e",
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            num_train_epochs=8,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            warmup_steps=3,
            weight_decay=0.1,
            logging_steps=1,
            eval_strategy="epoch",
            save_strategy="no" if parsed.save_steps is None else "steps",
            save_steps=parsed.save_steps or 500,
            report_to=[],
            use_cpu=True,
            dataloader_drop_last=False,
            accelerator_config={"split_batches": True},
            include_num_input_tokens_seen="non_padding",
            restore_callback_states_from_checkpoint=True,
        ),
        train_dataset=everything[:NUM_SAMPLES],
        eval_dataset=everything[-NUM_KEPT:],
        data_collator=default_data_collator if case == "packed" else collate,
        callbacks=[noting, Counting()],
    )
    output_of_train = trainer.train(resume_from_checkpoint=parsed.resume == "newest" or parsed.resume)
    counting = next(each for each in trainer.callback_handler.callbacks if isinstance(each, Counting))
    found = {
        "counted": counting.num_steps,
        "tokens": [entry["num_input_tokens_seen"] for entry in trainer.state.log_history if "loss" in entry],
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "rates": [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry],
        "evaluations": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        "steps": noting.steps,
        "recoveries": noting.recoveries,
        "global_step": output_of_train.global_step,
        "training_loss": output_of_train.training_loss,
        "after": trainer.evaluate()["eval_loss"],
        "norm": sum(float(parameter.detach().square().sum()) for parameter in trainer.model.parameters()),
    }
    trainer.save_model(str(Path(output).with_suffix("")))
    with Path(output).open("a") as file:
        file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
