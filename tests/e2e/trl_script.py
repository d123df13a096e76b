"""A script of TRL's trainers: `trl_script.py CASE OUTPUT`. What came of it is written to OUTPUT."""

import argparse
import time
from pathlib import Path

import datasets
import tokenizers
import torch
import transformers as hf
from trl import DPOConfig, RewardConfig, SFTConfig
from whole_script import ARGUMENTS, LLAMA, NUM_SAMPLES, PAUSE_S, write

from oobleck.trl import DPOTrainer, RewardTrainer, SFTTrainer

WORDS = ["[PAD]", "[BOS]", "[EOS]", *(f"w{number}" for number in range(61))]
TRAINERS = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig), "reward": (RewardTrainer, RewardConfig)}


def tokenizer():
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(WORDS)}, "[PAD]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]")


def words(number, count):
    return " ".join(f"w{(7 * number + 5 * place + number * place) % 61}" for place in range(count))


def rows(case):
    if case == "sft":
        return [{"text": words(n, 4 + n % 5)} for n in range(NUM_SAMPLES)]
    return [
        {"prompt": words(n, 3), "chosen": " " + words(n + 1, 2 + n % 4), "rejected": " " + words(n + 2, 3 + n % 3)}
        for n in range(NUM_SAMPLES)
    ]


def make_trainer(case, output, *, pause_s=PAUSE_S, **arguments):
    """Arguments are those of TrainingArguments, in place of the script's own."""
    kind, config = TRAINERS[case]
    torch.manual_seed(5)
    if case == "reward":
        model = hf.LlamaForSequenceClassification(hf.LlamaConfig(**LLAMA, num_labels=1))
    else:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA))
    others = {"ref_model": hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA))} if case == "dpo" else {}
    if pause_s:
        model.register_forward_pre_hook(lambda *_: time.sleep(pause_s))
    made = rows(case)
    given = {**ARGUMENTS, "bf16": False, "remove_unused_columns": True, "gradient_checkpointing": False, **arguments}
    return kind(
        model=model,
        args=config(**{**given, "output_dir": str(Path(output).with_suffix(""))}),
        train_dataset=datasets.Dataset.from_list(made[:-4]),
        eval_dataset=datasets.Dataset.from_list(made[-4:]),
        processing_class=tokenizer(),
        **others,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=sorted(TRAINERS))
    parser.add_argument("output")
    parser.add_argument("--pause", type=float, default=PAUSE_S)
    parsed = parser.parse_args()
    trainer = make_trainer(parsed.case, parsed.output, pause_s=parsed.pause)
    trainer.train()
    write(trainer, parsed.output)


if __name__ == "__main__":
    main()
